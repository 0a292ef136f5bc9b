// The table of samples: filters, sorting, pages, and the open sample beside it.

const PAGE = 50;
const BASIC = ['run', 'step', 'split', 'reward', 'correct', 'response_tokens', 'finish_reason', 'prompt', 'response'];
const TITLES = { correct: 'right', response_tokens: 'tokens', finish_reason: 'end', prompt_idx: 'prompt no.', sample_idx: 'sample no.' };
const TEXTS = ['prompt', 'response', 'answer', 'expected_answer'];

const distinct = (name) => [...new Set(cells(name))].filter((value) => !none(value)).sort();

/** The rows that pass every filter, sorted. Rows without a value come last in both directions. */
function chosenRows() {
  const between = (name, low, high) => {
    const values = cells(name);
    return low === '' && high === '' ? null : (row) => typeof values[row] === 'number' && !(values[row] < (low || -Infinity)) && !(values[row] > (high || Infinity));
  };
  const equals = (name, wanted) => { const values = cells(name); return wanted === '' ? null : (row) => String(values[row]) === wanted; };
  const words = state.q.toLowerCase();
  const tests = [
    equals('run', state.run), equals('split', state.split), equals('finish_reason', state.finish),
    equals('correct', { right: 'true', wrong: 'false', unknown: 'null' }[state.right] ?? ''),
    between('step', state.from, state.to), between('reward', state.low, state.high),
    state.shown ? (row) => !['', null, 'sibling'].includes(cell(row, 'select_reason')) : null,
    words ? (row) => searchTexts()[row].includes(words) : null,
  ].filter(Boolean);
  const found = [...data.rows.keys()].filter((row) => tests.every((test) => test(row)));
  return sorted(found, state.sort, state.down);
}
function sorted(rows, name, down) {
  if (!name) return sorted(sorted(rows, 'reward', false), 'step', true); // the newest first, and of them the worst
  const values = cells(name);
  const sign = down ? -1 : 1;
  const compare = (a, b) => (typeof a === 'number' && typeof b === 'number' ? a - b : String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0);
  return rows.sort((a, b) => none(values[a]) - none(values[b]) || (none(values[a]) ? 0 : sign * compare(values[a], values[b])));
}

const FEW = 8; // characters that are not worth an ellipsis
/** How many characters all prompts share at their beginning and at their end, in whole words; 0 for few. */
const sharedEnds = lazily(() => {
  const texts = [...new Set([...data.rows.keys()].map((row) => String(question(row) ?? '')))];
  const shared = (texts) => (texts.length < 2 ? 0 : texts[0].slice(0, texts.reduce((most, text) => Math.min(most, prefix(text, texts[0])), Infinity)).search(/\S*$/));
  const ends = [texts, texts.map((text) => [...text].reverse().join(''))].map(shared).map((length) => (length < FEW ? 0 : length));
  return Math.min(...texts.map((text) => text.length)) > ends[0] + ends[1] ? ends : [0, 0];
});
/** The part of a row's prompt that tells it from others. */
function distinguishing(row, most) {
  const [start, end] = sharedEnds();
  const text = String(question(row) ?? '');
  return (start ? '…' : '') + brief(text.slice(start, text.length - end), most) + (end ? '…' : '');
}

const cellClass = (name) => `c-${name.replace(/[^a-z_]/g, '-')}`;

let listed = [];
let opened = null; // the row of the open sample
let arrived = false; // whether the page has just been opened by a link: the list then shows the open sample

function samples(main) {
  if (!data.rows.length) {
    replace(main, ...moreNotes(), section('Samples', data.left ? 'None fits this page.' : 'No samples are stored in this run.'));
    return;
  }
  const list = h('div', { class: 'list' });
  const detail = h('article', { class: 'detail', tabindex: -1 });
  const asked = state.open ? [...data.rows.keys()].find((row) => nameOf(row) === state.open) : null; // undefined: it is not in the page
  if (state.split === 'auto') state.split = typeof asked === 'number' ? String(cell(asked, 'split')) : distinct('split').includes('train') ? 'train' : '';
  opened = asked ?? null;
  const refresh = (keep) => {
    listed = chosenRows();
    const place = arrived ? listed.indexOf(opened) : -1;
    state.page = place >= 0 ? Math.floor(place / PAGE) : keep ? state.page : 0;
    drawList(list, detail);
    remember();
  };
  const filter = () => refresh(false);
  replace(main, filters(filter), ...moreNotes(), h('div', { class: state.open ? 'split opened' : 'split' }, list, detail));
  refresh(true);
  const narrow = matchMedia('(max-width: 900px)').matches;
  if (asked === undefined) replace(detail, h('header', {}, h('button', { class: 'back', onclick: closeSample }, '‹ list')), h('div', { class: 'body' }, missing()));
  else if (asked !== null) openSample(detail, asked);
  else if (listed.length && !narrow) openSample(detail, listed[state.page * PAGE]);
  if (arrived) list.querySelector('tr.open')?.scrollIntoView({ block: 'nearest' });
  arrived = false;
}
/** Says that the sample of a link is not here, and how to get it. */
const missing = () => h('p', { role: 'alert' }, 'The sample of this link, ', h('b', {}, visible(state.open)), ', is not in this page. ',
  data.left ? 'It may not fit: write the page with a larger --size.' : 'Write the page again if the run has gone on since. A run stores the selected samples and the greedy evaluation; metrics.keep_all_rows stores every sample.');
/** A button of another page that leads to a sample, in one of its tabs. Back leads to that page again. */
const sampleLink = (row, title, tab = state.tab) => h('button', { class: 'link', onclick: () => { leave(); Object.assign(state, { open: nameOf(row), split: 'auto', tab }); show('samples'); } }, title);
/** Opens a sample for the reader: Back leads to the one before. */
function visit(detail, row) {
  if (row !== opened) leave();
  openSample(detail, row);
}

function filters(changed) {
  const select = (label, name, values) => choice(label, name, [['', 'all'], ...values], changed);
  const pairs = (name) => distinct(name).map((value) => [value, visible(value)]);
  const reset = () => {
    for (const name of ['q', 'run', 'split', 'from', 'to', 'low', 'high', 'right', 'finish', 'shown', 'sort', 'down', 'page']) state[name] = DEFAULTS[name];
    samples(document.querySelector('main'));
  };
  const shown = h('input', { type: 'checkbox', checked: state.shown, 'data-field': 'shown', onchange: (event) => { state.shown = event.target.checked; changed(); } });
  return h('div', { class: 'filters' },
    input('Text', 'q', 'search', changed, { placeholder: 'in prompts, responses, tools, answers   ( / )', onkeydown: (event) => { if (event.key === 'Enter') { later(() => { if (listed.length) { visit(document.querySelector('.detail'), listed[0]); document.querySelector('tr.open')?.focus(); } }, 200)(); } } }),
    several && select('Run', 'run', pairs('run')),
    select('Split', 'split', pairs('split')),
    select('Judged', 'right', [['right', 'right'], ['wrong', 'wrong'], ['unknown', 'not judged']]),
    select('End', 'finish', pairs('finish_reason')),
    bounds('Step', ['from', 'to'], changed), bounds('Reward', ['low', 'high'], changed),
    h('label', { class: 'inline', title: 'only samples that metrics.select chose (with metrics.keep_all_rows, all are stored)' }, shown, 'selected only'),
    h('button', { class: 'quiet', onclick: reset }, 'reset'));
}

function drawList(list, detail) {
  const pages = Math.max(1, Math.ceil(listed.length / PAGE));
  state.page = Math.min(Math.max(0, state.page), pages - 1);
  const shown = listed.slice(state.page * PAGE, (state.page + 1) * PAGE);
  const names = [...BASIC].filter((name) => columnNames.includes(name));
  const sortBy = (name) => () => {
    state.down = state.sort === name ? !state.down : !TEXTS.includes(name);
    state.sort = name;
    state.page = 0;
    listed = chosenRows();
    drawList(list, detail);
    remember();
  };
  const turn = (by) => () => { state.page += by; drawList(list, detail); remember(); list.scrollTop = 0; };
  const header = names.map((name) => h('th', { class: cellClass(name), 'aria-sort': (state.sort || 'step') === name ? (state.down ? 'descending' : 'ascending') : null },
    h('button', { 'data-sort': name, onclick: sortBy(name) }, TITLES[name] || visible(name))));
  const lines = shown.map((row) => h('tr', { 'data-row': row, class: row === opened ? 'open' : '', tabindex: 0, 'aria-current': row === opened ? 'true' : null, onclick: () => visit(detail, row), onkeydown: onEnter(() => visit(detail, row)) },
    names.map((name) => h('td', { class: cellClass(name) }, listCell(row, name)))));
  replace(list,
    h('div', { class: 'pager' }, h('span', { class: 'count' }, `${plural(listed.length, 'sample')}${listed.length < data.rows.length ? ` of ${data.rows.length.toLocaleString('en')}` : ''}`),
      pages > 1 && h('span', {}, h('button', { onclick: turn(-1), disabled: state.page === 0, 'aria-label': 'previous page' }, '‹'),
        ` page ${state.page + 1} of ${pages.toLocaleString('en')} `, h('button', { onclick: turn(1), disabled: state.page === pages - 1, 'aria-label': 'next page' }, '›')),
      h('span', { class: 'help' }, h('kbd', {}, 'j'), ' ', h('kbd', {}, 'k'), ' next, previous')),
    h('div', { class: 'scroll' }, h('table', { class: 'samples' }, h('thead', {}, h('tr', {}, header)), h('tbody', {}, lines))),
    !listed.length && h('p', { class: 'note' }, 'No sample passes these filters.'));
}

function listCell(row, name) {
  const value = cell(row, name);
  if (name === 'correct') return verdictSign(value);
  if (name === 'prompt') return h('bdi', {}, distinguishing(row, 110));
  if (name === 'response') return h('bdi', {}, brief(lastSaid(row), 110));
  return typeof value === 'number' ? figure(value) : none(value) ? '–' : brief(figure(value), 60);
}
function verdictSign(value) {
  if (value === true) return h('span', { class: 'sign right', title: 'right' }, '✓');
  if (value === false) return h('span', { class: 'sign wrong', title: 'wrong' }, '✗');
  return h('span', { class: 'sign', title: 'not judged' }, '–');
}

/** Opens the sample `by` places further down the list, on another page if needed. */
function moveSample(by) {
  const detail = document.querySelector('.detail');
  if (!detail || !listed.length) return;
  const now = listed.indexOf(opened);
  const next = Math.min(listed.length - 1, Math.max(0, now < 0 ? state.page * PAGE : now + by));
  if (Math.floor(next / PAGE) !== state.page) {
    state.page = Math.floor(next / PAGE);
    drawList(document.querySelector('.list'), detail);
  }
  openSample(detail, listed[next]);
  document.querySelector('tr.open')?.scrollIntoView({ block: 'nearest' });
}
