// The health page: warnings and the config.

function healthPage(main) {
  replace(main, ...runs.map(warningsOf), settingsOf());
}

function warningsOf({ name, warnings, notes }) {
  const own = warnings.filter((one) => !one.library);
  const libraries = warnings.filter((one) => one.library);
  const listed = (shown) => table(['level', 'count', 'message'], shown.map((one) => [h('span', { class: `badge ${one.level === 'WARNING' ? 'warn' : 'bad'}` }, one.level.toLowerCase()), figure(one.count), [h('span', { class: 'message' }, visible(one.text)), h('small', {}, `first at ${one.first.slice(0, 19)}`)]]), { 'data-table': 'warnings' });
  return section(several ? `Warnings of ${name}` : 'Warnings of the run', own.length ? 'From its logs. Warnings that differ only in numbers count as one.' : 'None in its logs.',
    own.length > 0 && listed(own), libraries.length > 0 && h('details', {}, h('summary', {}, plural(libraries.length, 'warning') + ' of libraries'), listed(libraries)),
    notes.length > 0 && h('ul', { class: 'notes' }, notes.map((note) => h('li', {}, visible(note)))));
}

const told = (value) => (typeof value === 'string' ? value : JSON.stringify(value) ?? '');
const settingsTable = (entries) => table(['setting', ...(several ? runs.map((one) => one.name) : ['value'])], entries.map(([key, ...values]) => [breakable(key), ...values.map((value) => brief(value, 300))]), { 'data-table': 'settings' });
const OF_THE_START = ['command', 'folder_of_command', 'dump_folder', 'resumed'];
/** The settings of which the runs have different values. */
function differencesOf() {
  const keys = [...new Set(runs.flatMap((one) => Object.keys(one.config)))].filter((key) => !OF_THE_START.includes(key.split('.')[0]));
  const entries = keys.map((key) => [key, ...runs.map((one) => told(one.config[key]))]).filter(([, first, ...others]) => others.some((value) => value.replace('{}', '') !== first.replace('{}', ''))); // an empty group has no value
  return section('What differs', entries.length ? '' : 'The configs are the same.', entries.length > 0 && settingsTable(entries));
}
function settingsOf() {
  const known = runs.map((one) => new Map(Object.entries({ ...one.config, ...Object.fromEntries(Object.entries(one.environment).map(([key, value]) => [`environment.${key}`, value])) })));
  const entries = [...new Set(known.flatMap((one) => [...one.keys()]))].map((key) => [key, ...known.map((one) => told(one.get(key)))]);
  const holder = h('div', {});
  const show = (wanted) => replace(holder, settingsTable(entries.filter((one) => one.join(' ').toLowerCase().includes(wanted.toLowerCase()))));
  return h('details', { class: 'settings', ontoggle: () => holder.childElementCount || show('') }, h('summary', {}, `Config and environment (${entries.length} settings)`),
    h('input', { type: 'search', placeholder: 'part of a setting', 'aria-label': 'search settings', oninput: later((event) => show(event.target.value), 120) }), holder);
}
