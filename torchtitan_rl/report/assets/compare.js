// The comparison of two runs: the same prompts side by side, outcomes, curves, and differences of their configs.

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
  const again = () => { state.pair = null; remember(); compare(main); };
  const names = runs.map((run, place) => [place, run.name]);
  const charts = h('div', { class: 'grid' });
  const pairs = h('div', {});
  replace(main,
    h('div', { class: 'filters' }, choice('A', 'a', names, again), choice('B', 'b', names, again), choice('Step', 'when', [['latest', 'latest of each run'], ...commonSteps(a, b).map((step) => [step, `step ${step}`])], again)),
    h('section', {}, h('h2', {}, 'The same prompts'), pairs), h('h2', {}, 'Curves'), charts,
    section('Config differences', null, configTable(a, b)));
  drawPairs(pairs, a, b);
  const hidden = state.hidden;
  state.hidden = runs.map((_, place) => place).filter((place) => place !== a && place !== b);
  placeCards(charts, FIRST.filter((one) => COMPARED.includes(one.title)).map(curveCard));
  state.hidden = hidden;
}

function commonSteps(a, b) {
  const steps = (run) => new Set(cells('step').filter((_, row) => cell(row, 'run') === run));
  const theirs = steps(b);
  return [...steps(a)].filter((step) => theirs.has(step)).sort((x, y) => x - y);
}

/** For each split and prompt in both runs, the rows of the chosen step, or of each run's latest step. */
function pairsOf(a, b) {
  const found = new Map();
  for (let row = 0; row < data.rows.count; row++) {
    const run = cell(row, 'run');
    const step = cell(row, 'step');
    if ((run !== a && run !== b) || (state.when !== 'latest' && String(step) !== String(state.when))) continue;
    const key = `${cell(row, 'split')}\u0000${cell(row, 'prompt')}`;
    if (!found.has(key)) found.set(key, { split: cell(row, 'split'), prompt: cell(row, 'prompt'), rows: [[], []] });
    for (const side of run === a && run === b ? [0, 1] : run === a ? [0] : [1]) {
      const rows = found.get(key).rows;
      if (rows[side].length && cell(rows[side][0], 'step') < step) rows[side] = [];
      if (!rows[side].length || cell(rows[side][0], 'step') === step) rows[side].push(row);
    }
  }
  const both = [...found.values()].filter((pair) => pair.rows[0].length && pair.rows[1].length);
  for (const pair of both) {
    pair.scores = pair.rows.map((rows) => mean(rows, 'reward'));
    pair.shares = pair.rows.map((rows) => mean(rows, 'correct'));
    const [was, is] = pair.shares.every((share) => share !== null) ? pair.shares : pair.scores;
    pair.outcome = was === is ? 'same' : is > was ? 'won' : 'lost';
  }
  const gap = (pair) => Math.abs((pair.scores[1] ?? 0) - (pair.scores[0] ?? 0));
  return both.sort((x, y) => (x.outcome === 'same') - (y.outcome === 'same') || gap(y) - gap(x));
}
function mean(rows, name) {
  const values = rows.map((row) => cell(row, name)).filter((value) => typeof value === 'number' || typeof value === 'boolean');
  return values.length ? values.reduce((sum, value) => sum + Number(value), 0) / values.length : null;
}

function drawPairs(container, a, b) {
  const all = pairsOf(a, b);
  const splits = [...new Set(all.map((pair) => pair.split))];
  const counts = (split) => Object.keys(OUTCOMES).map((one) => all.filter((pair) => pair.split === split && pair.outcome === one).length);
  if (!all.length) {
    replace(container, h('p', { class: 'note' }, 'These runs have no stored prompt in common. metrics.keep_all_rows stores every sample.'));
    return;
  }
  const shown = all.filter((pair) => !state.outcome || pair.outcome === state.outcome);
  const pick = (one) => () => { state.outcome = one; state.pair = null; remember(); drawPairs(container, a, b); };
  const open = shown[Math.min(state.pair ?? 0, shown.length - 1)];
  replace(container,
    table(['split', 'prompts in both', ...Object.values(OUTCOMES), `right in A`, `right in B`], splits.map((split) => {
      const here = all.filter((pair) => pair.split === split);
      const share = (side) => percent(average(here.map((pair) => pair.shares[side])));
      return [visible(split), figure(here.length), ...counts(split).map(figure), share(0), share(1)];
    }), { 'data-table': 'outcomes' }),
    h('div', { class: 'chips' }, [['', 'all'], ...Object.entries(OUTCOMES)].map(([one, title]) => h('button', { class: 'chip', 'data-outcome': one || 'all', 'aria-pressed': String(state.outcome === one), onclick: pick(one) }, title))),
    h('div', { class: 'pairs' },
      h('div', { class: 'list short' }, h('table', { class: 'samples' }, h('tbody', {}, shown.slice(0, PAIRS).map((pair, place) => h('tr', {
        class: pair === open ? 'open' : '', 'data-outcome': pair.outcome, onclick: () => { state.pair = place; remember(); drawPairs(container, a, b); },
      }, h('td', {}, figure(pair.scores[0])), h('td', {}, '→'), h('td', {}, figure(pair.scores[1])), h('td', { class: 'c-prompt' }, h('bdi', {}, brief(pair.prompt, 70)))))))),
      open && pairBody(open, a, b)),
    shown.length > PAIRS && h('p', { class: 'note' }, `The ${PAIRS} prompts with the largest differences, of ${shown.length.toLocaleString('en')}.`));
}
const average = (values) => { const known = values.filter((value) => value !== null); return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null; };

function pairBody(pair, a, b) {
  const sides = pair.rows.map(different);
  const base = String(cell(sides[0][0][0], 'response') ?? '');
  const one = (rows, write) => h('div', { class: 'sibling' },
    facts(h('b', {}, figure(cell(rows[0], 'reward'))), verdictSign(cell(rows[0], 'correct')), `${figure(cell(rows[0], 'response_tokens'))} tokens`, rows.length > 1 && `${rows.length} times`),
    textBlock(cell(rows[0], 'response'), write));
  const side = (place, which) => h('div', { class: 'history' },
    facts(h('span', { class: 'dot', color: palette(which) }), runs[which].name, `step ${cell(pair.rows[place][0], 'step')}`),
    sides[place].slice(0, MOST_ANSWERS).map((rows, i) => one(rows, place || i ? (text) => marked(base, text) : undefined)));
  return h('div', { class: 'pair' }, ...promptTurns(pair.rows[0][0]), answerLine(pair.rows[0][0], true), h('div', { class: 'siblings' }, side(0, a), side(1, b)));
}
/** The rows grouped by response, the most frequent first. */
function different(rows) {
  const found = new Map();
  for (const row of sorted([...rows], 'reward', true)) found.set(cell(row, 'response'), [...(found.get(cell(row, 'response')) || []), row]);
  return [...found.values()].sort((x, y) => y.length - x.length);
}

function configTable(a, b) {
  const ignored = new Set(['dump_folder', 'command']);
  const sides = [a, b].map((place) => ({ ...runs[place].config, ...Object.fromEntries(Object.entries(runs[place].environment).map(([key, value]) => [`environment.${key}`, value])) }));
  const keys = [...new Set(sides.flatMap(Object.keys))].sort().filter((key) => !ignored.has(key) && told(sides[0][key]) !== told(sides[1][key]));
  if (!keys.length) return h('p', { class: 'note' }, 'The configs are equal.');
  return table(['setting', runs[a].name, runs[b].name], keys.map((key) => [key, brief(told(sides[0][key]), 200), brief(told(sides[1][key]), 200)]), { 'data-table': 'config' });
}
/** A setting as text, without the addresses of functions, which differ from run to run. */
const told = (value) => (value === undefined ? '–' : typeof value === 'string' ? value : JSON.stringify(value)).replace(/ at 0x[0-9a-f]+/g, '');
