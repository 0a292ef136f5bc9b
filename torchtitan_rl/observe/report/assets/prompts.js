// Prompts by pass rate: which are solved, which are stuck, which have flipped; held-out prompts before and after.

const KINDS = { stuck: 'never right', solved: 'right from the first to the last', up: 'wrong at first, right at the end', down: 'right at first, wrong at the end', unstable: 'sometimes right' };

const LISTED = 200; // prompts listed
const cutNote = (shown) => shown.length > LISTED && h('p', { class: 'note' }, `The first ${LISTED} of ${shown.length.toLocaleString('en')}.`);
const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const rate = (value) => `${Number((100 * value).toFixed(1))} %`;
/** Each prompt of a split that has stored samples of at least two steps, with its pass rate at its first and last step. */
function promptRates(split) {
  const found = [];
  for (const rows of prompts().values()) {
    if (cell(rows[0], 'split') !== split) continue;
    const judged = rows.filter((row) => typeof cell(row, 'correct') === 'boolean' && !cell(row, 'unfinished'));
    const steps = [...new Set(judged.map((row) => cell(row, 'step')))].sort((a, b) => a - b);
    if (steps.length < 2) continue;
    const share = (rows) => average(rows.map((row) => Number(cell(row, 'correct'))));
    const at = (step) => share(judged.filter((row) => cell(row, 'step') === step));
    const [first, last, all] = [at(steps[0]), at(steps.at(-1)), share(judged)];
    const kind = all === 0 ? 'stuck' : all === 1 ? 'solved' : first < 0.5 && last > 0.5 ? 'up' : first > 0.5 && last < 0.5 ? 'down' : 'unstable';
    found.push({ row: judged.at(-1), first, last, all, kind, steps, samples: judged.length });
  }
  return found.sort((a, b) => a.all - b.all || a.last - b.last);
}

/** The last answers of the runs to each held-out prompt. */
function sideBySide(main) {
  const kinds = byJudgement();
  const again = () => { remember(); sideBySide(main); };
  const shown = kinds.filter(([kind]) => !kinds.some(([one]) => one === state.kind) || kind === state.kind).flatMap(([, lists]) => lists);
  const answer = (row) => [verdictSign(cell(row, 'correct')), ' ', sampleLink(row, brief(lastSaid(row), 120) || 'empty')];
  replace(main, ...moreNotes(), section('Held-out prompts', kinds.length ? 'The last answer of each run, where runs differ first.' : 'No held-out prompt was answered by all runs.',
    h('div', { class: 'filters' }, choice('Judged', 'kind', [['', 'all'], ...kinds.map(([kind, lists]) => [kind, `${kind}: ${lists.length}`])], again)),
    table(['prompt', ...runs.map((one) => one.name)], shown.slice(0, LISTED).map((rows) => [distinguishing(rows[0], 90), ...rows.map(answer)]), { 'data-table': 'answers' }),
    cutNote(shown)));
}

function promptsPage(main) {
  if (several) { sideBySide(main); return; }
  const splits = distinct('split');
  const tables = splits.map((split) => [split, promptRates(split)]).filter(([, rates]) => rates.length);
  const again = () => { remember(); promptsPage(main); };
  if (!tables.length) {
    replace(main, ...moreNotes(), section('Prompts', 'No prompt has judged samples of two steps. metrics.keep_all_rows stores every sample; a prompt must also come again, as held-out prompts do in each evaluation.'));
    return;
  }
  replace(main, ...moreNotes(), h('div', { class: 'filters' }, choice('Kind', 'kind', [['', 'all'], ...Object.entries(KINDS).map(([kind, words]) => [kind, `${kind}: ${words}`])], again)),
    tables.map(([split, rates]) => {
      const shown = rates.filter((one) => !state.kind || one.kind === state.kind);
      const counts = Object.keys(KINDS).map((kind) => `${rates.filter((one) => one.kind === kind).length} ${kind}`).join(', ');
      const share = (name) => percent(average(rates.map((one) => one[name])));
      return section(split, `${plural(rates.length, 'prompt')} with stored samples of two steps or more: ${counts}. Right at the first step ${share('first')}, at the last ${share('last')}.`,
        table(['prompt', 'kind', 'first', 'last', 'all', 'samples', 'steps'], shown.slice(0, LISTED).map((one) => [
          sampleLink(one.row, distinguishing(one.row, 90), 'history'),
          h('span', { class: `badge ${{ stuck: 'bad', down: 'bad', up: 'good', solved: 'good' }[one.kind] || ''}` }, one.kind), rate(one.first), rate(one.last), rate(one.all), figure(one.samples), `${one.steps[0]} to ${one.steps.at(-1)}`]), { 'data-table': 'prompts' }),
        cutNote(shown));
    }));
}
