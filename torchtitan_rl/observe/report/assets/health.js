// The health page: warnings and the config.

function healthPage(main) {
  replace(main, warningsOf(), settingsOf());
}

function warningsOf() {
  const { warnings, notes } = run;
  return section('Warnings of the run', warnings.length ? 'From its logs. Warnings that differ only in numbers count as one.' : 'None in its logs.',
    warnings.length > 0 && table(['level', 'count', 'message'], warnings.map((one) => [h('span', { class: `badge ${one.level === 'WARNING' ? 'warn' : 'bad'}` }, one.level.toLowerCase()), figure(one.count), [h('span', { class: 'message' }, visible(one.text)), h('small', {}, `first at ${one.first.slice(0, 19)}`)]]), { 'data-table': 'warnings' }),
    notes.length > 0 && h('ul', { class: 'notes' }, notes.map((note) => h('li', {}, visible(note)))));
}

const told = (value) => (typeof value === 'string' ? value : JSON.stringify(value));
function settingsOf() {
  const entries = Object.entries({ ...run.config, ...Object.fromEntries(Object.entries(run.environment).map(([key, value]) => [`environment.${key}`, value])) });
  const holder = h('div', {});
  const show = (wanted) => replace(holder, table(['setting', 'value'], entries.filter(([key, value]) => `${key} ${told(value)}`.toLowerCase().includes(wanted.toLowerCase())).map(([key, value]) => [breakable(key), brief(told(value), 300)])));
  return h('details', { class: 'settings', ontoggle: () => holder.childElementCount || show('') }, h('summary', {}, `Config and environment (${entries.length} settings)`),
    h('input', { type: 'search', placeholder: 'part of a setting', 'aria-label': 'search settings', oninput: later((event) => show(event.target.value), 120) }), holder);
}
