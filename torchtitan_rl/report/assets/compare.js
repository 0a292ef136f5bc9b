// The comparison of runs at equal steps: final metrics and configs of all, then two side by side on the same prompts.

const OUTCOMES = { won: 'B better', lost: 'B worse', same: 'equal' };
const COMPARED = ['Reward', 'Held-out accuracy', 'Completion length', 'Entropy', 'Gradient norm', 'Groups'];
const PAIRS = 200;
const MOST_ANSWERS = 6; // different answers of one run to one prompt

function compare(main) {
  if (runs.length < 2) {
    replace(main, section('Compare', 'This report contains one run. Pass two run folders to compare them:'), h('pre', { class: 'text' }, 'python -m torchtitan_rl.report RUN RUN2'));
    return;
  }
  const [a, b] = [Math.min(Number(state.a) || 0, runs.length - 1), Math.min(Number(state.b) || 0, runs.length - 1)];
  const again = () => { state.pair = ''; remember(); compare(main); };
  const names = runs.map((run, place) => [place, run.name]);
  const charts = h('div', { class: 'grid' });
  const pairs = h('div', {});
  const other = taskSettings(a, b);
  replace(main, other.length > 0 && h('p', { class: 'note', role: 'alert' }, `The tasks differ (${other.join(', ')}): rewards and accuracies measure different things, so there is no verdict.`),
    [a, b].filter((place) => runs[place].demonstrated).map((place) => h('p', { class: 'note', role: 'alert' }, `${runs[place].name} learns from demonstrations: rewards, accuracies and lengths in training are the data’s, not its policy’s.`)), finalMetrics(), section(runs.length > 2 ? 'Settings that differ' : 'Config differences', null, configTable(runs.map((_, place) => place))),
    h('h2', { class: 'run' }, 'The same prompts in two runs'),
    moreNote(), h('div', { class: 'filters' }, choice('A', 'a', names, again), choice('B', 'b', names, again), choice('Step', 'when', [['latest', 'latest that both have'], ...commonSteps(a, b).map((step) => [step, `step ${step}`])], again)),
    pairedMetrics(a, b), h('section', {}, pairs), h('h2', {}, 'Curves'), charts);
  drawPairs(pairs, a, b);
  placeCards(charts, among([a, b], () => FIRST.filter((one) => COMPARED.includes(one.title)).map(curveCard)));
}

function commonSteps(a, b) {
  const steps = (run) => new Set(cells('step').filter((_, row) => cell(row, 'run') === run));
  const theirs = steps(b);
  return [...steps(a)].filter((step) => theirs.has(step)).sort((x, y) => x - y);
}

/** For each split and prompt, the rows of both runs at the chosen step, or at the latest step that both have for this prompt. */
function pairsOf(a, b) {
  const found = new Map();
  for (let row = 0; row < data.rows.count; row++) {
    const run = cell(row, 'run');
    const step = cell(row, 'step');
    if ((run !== a && run !== b) || (state.when !== 'latest' && String(step) !== String(state.when))) continue;
    const key = `${cell(row, 'split')}\u0000${cell(row, 'prompt')}`;
    if (!found.has(key)) found.set(key, { split: cell(row, 'split'), prompt: cell(row, 'prompt'), steps: [new Map(), new Map()], rows: [[], []] });
    for (const side of run === a && run === b ? [0, 1] : run === a ? [0] : [1]) {
      const steps = found.get(key).steps[side];
      steps.set(step, [...(steps.get(step) || []), row]);
    }
  }
  for (const pair of found.values()) {
    const common = [...pair.steps[0].keys()].filter((step) => pair.steps[1].has(step)).sort((x, y) => y - x);
    const at = common.map((step) => pair.steps.map((steps) => steps.get(step)));
    pair.rows = at[0] || pair.rows;
    pair.fair = at.map(matched).find((sides) => sides[0].length) || [[], []];
    if (pair.fair[0].length) pair.rows = pair.steps.map((steps) => steps.get(cell(pair.fair[0][0], 'step')));
  }
  const both = [...found.values()].filter((pair) => pair.rows[0].length && pair.rows[1].length);
  for (const pair of both) {
    pair.scores = pair.fair.map((rows) => mean(rows, 'reward'));
    pair.shares = pair.fair.map((rows) => mean(rows, 'correct'));
    const [was, is] = pair.shares.every((share) => share !== null) ? pair.shares : pair.scores;
    pair.outcome = was === null || is === null ? '' : was === is ? 'same' : is > was ? 'won' : 'lost';
  }
  const rank = { won: 0, lost: 0, same: 1, '': 2 };
  const gap = (pair) => Math.abs((pair.scores[1] ?? 0) - (pair.scores[0] ?? 0));
  return both.sort((x, y) => rank[x.outcome] - rank[y.outcome] || gap(y) - gap(x));
}
/**
 * The rows of two runs to compare on one prompt at one step: unbiased ones, as many of each, and the same samples where their
 * numbers agree. Best of one run against random of the other would be a difference that is none.
 */
function matched(sides) {
  const by = (names) => sides.map((rows) => new Map(rows.filter(unbiased).reverse().map((row) => [names.map((name) => cell(row, name)).join('/'), row])));
  const shared = ([a, b]) => { const keys = [...a.keys()].filter((key) => b.has(key)); return [keys.map((key) => a.get(key)), keys.map((key) => b.get(key))]; };
  const exact = shared(by(['prompt_idx', 'sample_idx']));
  const [a, b] = sides.map((rows) => new Set(rows.map((row) => cell(row, 'prompt_idx'))));
  return exact[0].length || [...a].some((place) => b.has(place)) ? exact : shared(by(['sample_idx']));
}
const mean = (rows, name) => average(rows.map((row) => cell(row, name)).map((value) => (none(value) ? null : Number(value))));

function drawPairs(container, a, b) {
  const all = pairsOf(a, b);
  const splits = [...new Set(all.map((pair) => pair.split))];
  const fair = (split) => all.filter((pair) => pair.split === split && pair.outcome);
  const counts = (split) => Object.keys(OUTCOMES).map((one) => fair(split).filter((pair) => pair.outcome === one).length);
  const other = taskSettings(a, b);
  if (!all.length) {
    replace(container, h('p', { class: 'note' }, 'These runs have no stored prompt in common at an equal step. metrics.keep_all_rows stores every sample.'));
    return;
  }
  const shown = all.filter((pair) => !state.outcome || pair.outcome === state.outcome);
  const pick = (one) => () => { state.outcome = one; state.pair = ''; remember(); drawPairs(container, a, b); };
  const open = shown.find((pair) => pairName(pair) === state.pair) || shown[0];
  const view = (pair) => { state.pair = pairName(pair); remember(); drawPairs(container, a, b); };
  const without = splits.filter((split) => !fair(split).length);
  replace(container,
    !other.length && without.length < splits.length && table(['split', 'prompts', ...Object.values(OUTCOMES), 'right in A', 'right in B', 'p', 'samples of each'], splits.filter((split) => fair(split).length).map((split) => {
      const here = fair(split);
      const share = (side) => percent(average(here.map((pair) => pair.shares[side])));
      const [won, lost] = counts(split);
      return [visible(split), figure(here.length), ...counts(split).map(figure), share(0), share(1), figure(pairedP(won, lost)), figure(here.reduce((sum, pair) => sum + pair.fair[0].length, 0))];
    }), { 'data-table': 'outcomes' }),
    !other.length && h('p', { class: 'note' }, 'p: chance of such a difference, or a larger one, between two equal runs. McNemar’s exact test on the prompts that are better or worse. ',
      'Compared are equally many samples of a prompt and step: all that are stored in both, or, if only selected ones are, the randomly selected ones. ',
      without.length > 0 && `${without.map(visible).join(', ')}: none can be compared. metrics.keep_all_rows stores every sample.`),
    h('div', { class: 'chips' }, [['', 'all'], ...Object.entries(OUTCOMES)].map(([one, title]) => h('button', { class: 'chip', 'data-outcome': one || 'all', 'aria-pressed': String(state.outcome === one), onclick: pick(one) }, title))),
    h('div', { class: 'pairs' },
      h('div', { class: 'list short' }, h('table', { class: 'samples' }, h('thead', {}, h('tr', {}, ['A', 'B', 'prompt', 'split'].map((title) => h('th', {}, title)))), h('tbody', {}, shown.slice(0, PAIRS).map((pair) => h('tr', {
        class: pair === open ? 'open' : '', 'data-outcome': pair.outcome, tabindex: 0, onclick: () => view(pair), onkeydown: onEnter(() => { view(pair); container.querySelector('tr.open')?.focus(); }),
      }, h('td', {}, figure(pair.scores[0])), h('td', {}, h('b', { class: { won: 'sign right', lost: 'sign wrong' }[pair.outcome] }, figure(pair.scores[1]))), h('td', { class: 'c-prompt' }, h('bdi', {}, brief(question(pair.rows[0][0]), 70))), h('td', { class: 'c-split' }, visible(pair.split))))))),
      open && pairBody(open, a, b)),
    !shown.length && h('p', { class: 'note' }, 'No prompt.'), shown.length > PAIRS && h('p', { class: 'note' }, `The ${PAIRS} prompts with the largest differences, of ${shown.length.toLocaleString('en')}.`));
}
/** A pair's name in links: its split, and a hash of its prompt. */
const pairName = (pair) => `${pair.split}/${[...String(pair.prompt)].reduce((sum, character) => (Math.imul(sum, 31) + character.codePointAt(0)) | 0, 0)}`;
/** The settings of the task that differ between two runs. */
function taskSettings(a, b) {
  const keys = [a, b].flatMap((place) => Object.keys(runs[place].config).filter((key) => key.startsWith('task.') && key !== 'task.warm_start'));
  return [...new Set(keys)].filter((key) => told(runs[a].config[key]) !== told(runs[b].config[key]));
}

/** The logged metrics of two runs, paired over the steps that both have: they are of all samples, also of those not stored. */
function pairedMetrics(a, b) {
  const lines = MEASURES.flatMap(([title, key]) => {
    const [x, y] = [a, b].map((place) => new Map(runs[place].steps.map((step, i) => [step, runs[place].series[key]?.[i] ?? null]).filter(([, value]) => value !== null)));
    const steps = [...x.keys()].filter((step) => y.has(step));
    if (!steps.length) return [];
    const write = key.endsWith('accuracy') ? percent : figure;
    const means = [x, y].map((side) => average(steps.map((step) => side.get(step))));
    const higher = (p, q) => figure(steps.filter((step) => p.get(step) > q.get(step)).length);
    const gap = means[1] - means[0];
    return [[title, figure(steps.length), ...means.map(write), (gap > 0 ? '+' : '') + (write === percent ? `${(100 * gap).toFixed(1)} points` : figure(gap)), higher(x, y), higher(y, x)]];
  });
  return lines.length > 0 && section('Means over their common steps', 'From the logged metrics, which are of all samples. Two runs that differ only in the seed differ too: compare several seeds before you call one setting better.',
    table(['metric', 'steps', 'A', 'B', 'B − A', 'A higher', 'B higher'], lines, { 'data-table': 'paired' }));
}
/** The p-value of McNemar's exact test: prompts that are better and worse are equally likely if the runs are equal. */
function pairedP(won, lost) {
  const n = won + lost;
  let [term, sum] = [-n * Math.LN2, 0]; // the logarithm of a binomial probability
  for (let k = 0; k <= Math.min(won, lost); k++) {
    sum += Math.exp(term);
    term += Math.log((n - k) / (k + 1));
  }
  return Math.min(1, 2 * sum);
}
const average = (values) => { const known = values.filter((value) => value !== null); return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null; };

function pairBody(pair, a, b) {
  const sides = pair.rows.map(different);
  const base = saidText(sides[0][0][0]);
  const one = (rows, write) => h('div', { class: 'sibling' },
    facts(h('b', {}, figure(cell(rows[0], 'reward'))), verdictSign(cell(rows[0], 'correct')), `${figure(cell(rows[0], 'response_tokens'))} tokens`, rows.length > 1 && `${rows.length} times`),
    textBlock(saidText(rows[0]), write));
  const side = (place, which) => h('div', { class: 'history' },
    facts(runMark(which), runs[which].name, `step ${cell(pair.rows[place][0], 'step')}`),
    sides[place].slice(0, MOST_ANSWERS).map((rows, i) => one(rows, place || i ? (text) => marked(base, text) : undefined)));
  return h('div', { class: 'pair' }, ...promptTurns(pair.rows[0][0]), answerLine(pair.rows[0][0], true), h('div', { class: 'siblings' }, side(0, a), side(1, b)));
}
/** The rows grouped by what was said, the most frequent first. */
function different(rows) {
  const found = new Map();
  for (const row of sorted([...rows], 'reward', true)) found.set(saidText(row), [...(found.get(saidText(row)) || []), row]);
  return [...found.values()].sort((x, y) => y.length - x.length);
}

function configTable(places) {
  const ignored = new Set(['dump_folder', 'command', 'folder_of_command']);
  const sides = places.map((place) => ({ ...runs[place].config, ...Object.fromEntries(Object.entries(runs[place].environment).map(([key, value]) => [`environment.${key}`, value])) }));
  const differs = (key) => sides.some((side) => told(side[key]) !== told(sides[0][key]));
  const keys = [...new Set(sides.flatMap(Object.keys))].sort().filter((key) => !ignored.has(key) && !key.startsWith('environment.measured_speeds') && !/^sources\..*\.sha256$/.test(key) && differs(key));
  if (!keys.length) return h('p', { class: 'note' }, 'The configs are equal.');
  const all = table(['setting', ...places.map(runName)], keys.map((key) => [breakable(key), ...sides.map((side) => brief(told(side[key]), 200))]), { 'data-table': 'config', even: places.length === 2 });
  return keys.length > 8 ? h('details', { class: 'rendered' }, h('summary', {}, `${keys.length} settings differ`), all) : all;
}
const runName = (place) => h('span', {}, runMark(place), runs[place].name);

const MEASURES = [['Held-out accuracy', 'evaluation/accuracy'], ['Sampled accuracy', 'evaluation/sampled/accuracy'], ['Reward', 'reward/mean'], ['Training accuracy', 'train/accuracy'], ['Completion length', 'completions/length/mean'], ['Entropy', 'policy/entropy'], ['Gradient norm', 'optimizer/grad_norm'], ['Seconds of a step', 'time/step']];
const TAIL = 10; // a tenth of the common steps, at most this many, is averaged
/** Metrics of all runs at the last step that all of them have; those of single steps as means of the last tenth up to it. */
function finalMetrics() {
  const at = (run, key) => run.steps.filter((_, i) => run.series[key][i] !== null && run.series[key][i] !== undefined);
  const lines = MEASURES.flatMap(([title, key]) => {
    const having = runs.filter((run) => run.series[key]);
    if (!having.length) return [];
    const common = having.map((run) => at(run, key)).reduce((all, steps) => all.filter((step) => steps.includes(step)));
    if (!common.length) return [];
    const evaluated = key.startsWith('evaluation/');
    const steps = common.slice(-(evaluated ? 1 : Math.max(1, Math.min(TAIL, Math.floor(common.length / 10)))));
    const value = (run) => run.series[key] && average(steps.map((step) => run.series[key][run.steps.indexOf(step)] ?? null));
    const ends = (run) => ['low', 'high'].map((end) => run.series[`${key}_${end}`]?.[run.steps.indexOf(steps[0])] ?? null);
    const shown = (run) => (run.series[key] ? [h('b', {}, (key.endsWith('accuracy') ? percent : figure)(value(run))), evaluated && ends(run)[0] !== null && h('small', {}, ` ${percent(ends(run)[0])} to ${percent(ends(run)[1])}`)].filter(Boolean) : '–');
    return [[h('span', {}, `${title} `, h('small', {}, steps.length > 1 ? `mean of steps ${steps[0]} to ${steps.at(-1)}` : `step ${steps[0]}`)), ...runs.map(shown)]];
  });
  const ended = ['How it ended', ...runs.map((run) => [h('span', { class: `badge ${run.ending.level}` }, visible(run.ending.text.split(/, the last|: /)[0]))])];
  return section('At equal steps', 'The last step that all runs have, with 95 % intervals of accuracies.', table(['metric', ...runs.map((_, place) => runName(place))], [...lines, ended], { 'data-table': 'final', even: runs.length === 2 }));
}
/** A setting as text, without the addresses of functions, which differ from run to run. */
const told = (value) => (value === undefined ? '–' : typeof value === 'string' ? value : JSON.stringify(value)).replace(/ at 0x[0-9a-f]+/g, '');
