// The health page: warnings, counts that should be 0, repeated answers, rewards that correlate with length.

function healthPage(main) {
  replace(main, data.more && section('This report', 'Verdicts and this page use all samples that were read.', moreNote(() => healthPage(main))),
    runs.map((run, place) => h('div', { class: 'health', 'data-run': place },
      runs.length > 1 && h('h2', { class: 'run' }, runMark(place), run.name),
      warningsOf(run), countsOf(run), h('div', { class: 'two' }, duplicatesOf(run), partsOf(run)), scatterOf(run), metricsOf(run), settingsOf(run))));
  for (const one of main.querySelectorAll('figure')) sight.observe(one);
}

function warningsOf(run) {
  const { warnings, notes } = run.health;
  return section('Warnings of the run', warnings.length ? 'From its logs. Warnings that differ only in numbers count as one.' : 'None in its logs.',
    warnings.length > 0 && table(['level', 'count', 'message'], warnings.map((one) => [h('span', { class: `badge ${one.level === 'WARNING' ? 'warn' : 'bad'}` }, one.level.toLowerCase()), figure(one.count), [h('span', { class: 'message' }, visible(one.text)), h('small', {}, `first at ${one.first.slice(0, 19)}`)]]), { 'data-table': 'warnings' }),
    notes.length > 0 && h('ul', { class: 'notes' }, notes.map((note) => h('li', {}, visible(note)))));
}

function countsOf(run) {
  const { counts } = run.health;
  const wrong = counts.filter((one) => one.total > 0);
  const right = counts.filter((one) => one.total === 0).map((one) => one.key);
  return section('Counts that should be 0', right.length ? `Always 0: ${right.join(', ')}` : counts.length ? null : 'None were recorded.',
    wrong.length > 0 && table(['metric', 'total', 'first at step'], wrong.map((one) => [breakable(one.key), figure(one.total), figure(one.first)]), { 'data-table': 'counts' }));
}

function duplicatesOf(run) {
  const { answers, prompts: different } = run.health.duplicates;
  const share = (count) => percent(different ? count / different : null);
  return section('Answers given to several prompts', `Out of ${plural(different, 'training prompt')} with stored samples${run.health.drawn ? ', the randomly selected ones' : ''}. An answer given far more often than expected is a sign of reward hacking.`,
    answers.length > 0 ? table(['answer', 'prompts', 'share', 'expected by'], answers.map((one) => [h('bdi', {}, brief(one.answer, 60)), figure(one.prompts), share(one.prompts), figure(one.expected)]), { 'data-table': 'duplicates' })
      : h('p', { class: 'note' }, 'No answer was given to more than one prompt.'));
}

function partsOf(run) {
  const { parts } = run.health;
  return section('Reward against its parts', `Mean: over all samples of the run. r: correlation of a part with the total reward over ${run.health.drawn ? 'the randomly selected' : 'stored'} training samples. It is undefined for a constant part.`,
    parts.length > 0 && table(['part', 'mean', 'r', 'samples of r'], parts.map((one) => [breakable(one.key.slice(7)), figure(one.mean), figure(one.r), figure(one.n)]), { 'data-table': 'parts' }));
}

function scatterOf(run) {
  const { points, n, r } = run.health.scatter;
  if (!points.length) return null;
  const label = `reward by response tokens, ${plural(n, run.health.drawn ? 'randomly selected sample' : 'training sample')}${n > points.length ? `, ${points.length} drawn` : ''}, equal ones side by side${r === null ? '' : `; correlation ${r.toFixed(2)}`}`;
  const apart = points.map(([length, ...rest], i) => [length + 0.6 * ((i * 0.618) % 1) - 0.3, ...rest]).sort((a, b) => a[0] - b[0]); // equal points would hide each other
  const only = (title, keys) => among([runs.indexOf(run)], () => curveCard({ title, keys }));
  return h('div', { class: 'grid' }, pointsCard('Length against reward', apart, label, (point) => correctColor(point[2])),
    only('Length of right and wrong', [['completions/right_length/mean', 'right'], ['completions/wrong_length/mean', 'wrong']]),
    only('Reward and its parts', [['reward/mean', 'reward'], ...Object.keys(run.series).filter((key) => /^reward\/(?!shaped\/).+\/mean$/.test(key)).map((key) => [key, key.slice(7, -5)])]));
}

function metricsOf(run) {
  const { metrics } = run.health;
  return section('Missing or stopped metrics', metrics.length ? null : 'None.',
    metrics.length > 0 && table(['metric', 'state', 'reason'], metrics.map((one) => [breakable(one.key), h('span', { class: 'badge warn' }, one.state), one.why]), { 'data-table': 'metrics' }));
}

function settingsOf(run) {
  const entries = Object.entries({ ...run.config, ...Object.fromEntries(Object.entries(run.environment).map(([key, value]) => [`environment.${key}`, value])) });
  const holder = h('div', {});
  const show = (wanted) => replace(holder, table(['setting', 'value'], entries.filter(([key, value]) => `${key} ${told(value)}`.toLowerCase().includes(wanted.toLowerCase())).map(([key, value]) => [breakable(key), brief(told(value), 300)])));
  return h('details', { class: 'settings', ontoggle: () => holder.childElementCount || show('') }, h('summary', {}, `Config and environment (${entries.length} settings)`),
    h('input', { type: 'search', placeholder: 'part of a setting', 'aria-label': 'search settings', oninput: later((event) => show(event.target.value), 120) }), holder);
}
