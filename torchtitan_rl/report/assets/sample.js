// One sample: its conversation, its numbers, its siblings, and its prompt over training.

const MOST_CHARACTERS = 6000; // characters of a text shown before "show all"
const MOST_WORDS = 1500; // longest texts that are compared word by word
const LONG = 200; // words; longer texts are compared line by line
const MANY = 60; // siblings, or steps of one prompt, shown

function openSample(detail, row) {
  opened = row;
  ask(row);
  const siblings = sorted([...(groups().get(groupKey(row)) || [row])], 'reward', true);
  const history = prompts().get(promptKey(row)) || [row];
  if (!['sample', 'siblings', 'history'].includes(state.tab)) state.tab = 'sample';
  const tabs = [['sample', 'Sample'], ['siblings', `Siblings ${siblings.length}`], ['history', `Over training ${new Set(history.map((one) => cell(one, 'step'))).size}`]];
  const body = { sample: () => sampleBody(row), siblings: () => siblingsBody(siblings, row), history: () => historyBody(history) }[state.tab]();
  const where = [runs.length > 1 && runs[cell(row, 'run')].name, `step ${figure(cell(row, 'step'))}`, cell(row, 'split'), cell(row, 'prompt_idx') !== null && `prompt ${cell(row, 'prompt_idx')}`,
    cell(row, 'group_size') > 1 && `sample ${cell(row, 'sample_idx')} of ${cell(row, 'group_size')}`].filter(Boolean);
  replace(detail,
    h('header', {}, h('button', { class: 'back', onclick: closeSample }, '‹ list'), h('span', { class: 'facts' }, where.map(visible).join(' · ')), badges(row)),
    h('div', { class: 'tabs', role: 'tablist' }, tabs.map(([name, title]) => h('button', {
      role: 'tab', 'aria-selected': String(state.tab === name), 'data-tab': name, tabindex: state.tab === name ? 0 : -1, onclick: () => { state.tab = name; openSample(detail, row); }, onkeydown: arrows,
    }, title))),
    body);
  detail.parentNode.classList.add('opened');
  for (const line of document.querySelectorAll('table.samples tr[data-row]')) {
    const open = Number(line.dataset.row) === row;
    line.classList.toggle('open', open);
    if (open) line.setAttribute('aria-current', 'true'); else line.removeAttribute('aria-current');
  }
  for (const figure_ of detail.querySelectorAll('figure')) sight.observe(figure_);
  remember();
}
function closeSample() {
  opened = null;
  state.open = state.of = '';
  document.querySelector('.split')?.classList.remove('opened');
  document.querySelector('tr.open')?.classList.remove('open');
  remember();
}

function badges(row) {
  const reason = cell(row, 'select_reason');
  const correct = cell(row, 'correct');
  return h('span', { class: 'badges' },
    h('span', { class: 'badge' }, 'reward ', h('b', {}, figure(cell(row, 'reward')))),
    correct !== null && h('span', { class: `badge ${correct ? 'good' : 'bad'}` }, correct ? 'right' : 'wrong'),
    cell(row, 'finish_reason') && h('span', { class: `badge ${cell(row, 'finish_reason') === 'stop' ? '' : 'warn'}` }, visible(cell(row, 'finish_reason'))),
    cell(row, 'left_out') && h('span', { class: 'badge warn' }, `not in the loss: ${visible(cell(row, 'left_out'))}`),
    reason && h('span', { class: 'badge quiet', title: 'the selectors of metrics.select that chose it' }, visible(reason)));
}

/** A text block. A long text is cut until the reader asks for all of it. `write` makes the nodes of a text. */
function textBlock(text, write = (shown) => [visible(shown)]) {
  const whole = String(text ?? '');
  const block = h('pre', { class: 'text', dir: 'auto' });
  const show = (all) => replace(block, ...write(all ? whole : whole.slice(0, MOST_CHARACTERS)),
    !all && whole.length > MOST_CHARACTERS && h('button', { class: 'more', onclick: () => show(true) }, `show all ${whole.length.toLocaleString('en')} characters`));
  show(false);
  if (!whole) block.append(h('em', {}, 'empty'));
  return block;
}
const turn = (role, ...content) => h('div', { class: `turn ${['system', 'user', 'assistant', 'tool'].find((one) => role.startsWith(one)) || ''}` }, h('span', { class: 'role' }, visible(role)), ...content);

/** A message of a conversation. `number`: of the policy's turn; 0 for other roles. */
function messageTurn(message, number = 0) {
  const said = typeof message?.content === 'string' ? message.content : JSON.stringify(message?.content ?? message, null, 1);
  const earned = ['reward', 'advantage'].map((name) => typeof message?.[name] === 'number' && h('span', { class: `badge ${message[name] < 0 ? 'bad' : message[name] > 0 ? 'good' : ''}` }, `${name} `, h('b', {}, figure(message[name]))));
  const logged = Object.entries(message?.logged ?? {}).filter(([, value]) => value).map(([name, value]) => h('span', { class: name.includes('error') || name === 'invalid' ? 'badge bad' : 'badge' }, `${visible(name.replaceAll('_', ' '))} ${visible(figure(value))}`));
  const badges_ = [...earned, ...logged].filter(Boolean);
  const element = turn([message?.role ?? 'message', message?.name].filter(Boolean).join(' '), number > 0 && h('span', { class: 'role' }, ` · turn ${number}`), badges_.length > 0 && h('span', { class: 'badges' }, badges_), textBlock(said), message?.tool_calls && textBlock(JSON.stringify(message.tool_calls, null, 1)));
  if (isToolError(message)) element.classList.add('error');
  return element;
}

const isToolError = (message) => message?.role === 'tool' && typeof message.content === 'string' && /^error\b/i.test(message.content);
/** The conversation in numbers: turns, calls, errors, seconds of waiting for tools, tokens that others wrote. */
function conversationCards(row, said) {
  const sum = (name) => said.reduce((total, message) => total + (Number(message?.logged?.[name]) || 0), 0);
  const errors = Math.max(sum('tool_errors'), said.filter(isToolError).length);
  const waiting = cell(row, 'environment_seconds');
  const cards = [['turns', said.filter((message) => message?.role === 'assistant').length], ['tool calls', Math.max(sum('tool_calls'), said.filter((message) => message?.role === 'tool').length)], ['tool errors', errors, errors > 0],
    typeof waiting === 'number' && ['waiting', seconds(waiting)], cell(row, 'observed_tokens') && ['tokens of others', figure(cell(row, 'observed_tokens'))]].filter(Boolean);
  return h('dl', { class: 'cards' }, cards.map(([name, value, bad]) => h('div', { class: bad ? 'bad' : '' }, h('dt', {}, name), h('dd', {}, String(value)))));
}
function conversationTurns(said) {
  let number = 0;
  return said.map((message) => messageTurn(message, message?.role === 'assistant' ? ++number : 0));
}

/** The prompt as turns if it was a chat, else as the text that the policy read. */
function promptTurns(row) {
  const messages = cell(row, 'messages');
  if (!Array.isArray(messages) || !messages.length) return [turn('prompt', textBlock(cell(row, 'prompt')))];
  return [...messages.map((message) => messageTurn(message)),
    h('details', { class: 'rendered' }, h('summary', {}, 'as the policy read it'), textBlock(cell(row, 'prompt')))];
}

function sampleBody(row) {
  const role = Array.isArray(cell(row, 'messages')) ? 'assistant' : 'response';
  const said = cell(row, 'conversation');
  const response = Array.isArray(said) ? [...conversationTurns(said), h('details', { class: 'rendered', open: state.tokensOpen, ontoggle: (event) => { state.tokensOpen = event.target.open; remember(); } }, h('summary', {}, 'as tokens'), responseBlock(row))] : [turn(role, responseBlock(row))];
  return h('div', { class: 'body' }, Array.isArray(said) && conversationCards(row, said), ...promptTurns(row), ...response, answerLine(row), breakdown(row), otherColumns(row));
}

const PAINTS = { logprob: 'log-probability', diff: 'trainer − sampler', advantage: 'advantage', age: 'age in updates' };
/** The response. If its tokens are stored, they can be coloured. */
function responseBlock(row) {
  const tokens = spreadTokens(cell(row, 'tokens'));
  const known = tokens && Array.isArray(tokens.text) ? Object.keys(PAINTS).filter((name) => Array.isArray(tokens[name])) : [];
  if (!known.length) return textBlock(cell(row, 'response'));
  const holder = h('div', {});
  const paint = () => replace(holder, h('div', { class: 'paints' }, ['', ...known].map((name) => h('button', {
    class: 'chip', 'aria-pressed': String(state.paint === name), 'data-paint': name || 'none', onclick: () => { state.paint = name; remember(); paint(); },
  }, PAINTS[name] || 'no colours'))), known.includes(state.paint) ? paintedTokens(tokens, state.paint) : textBlock(cell(row, 'response')));
  paint();
  return holder;
}
/** The tokens with an advantage each: a single advantage is copied to every token that the policy sampled. */
function spreadTokens(tokens) {
  if (!tokens || typeof tokens.advantage !== 'number') return tokens;
  return { ...tokens, advantage: (tokens.logprob || []).map((value) => (value === null ? null : tokens.advantage)) };
}
const STRONGEST = { light: 65, dark: 45 }; // percent of colour behind a token; its text stays readable
function paintedTokens(tokens, name) {
  const values = tokens[name];
  const own = Math.max(1e-12, ...values.map((value) => Math.abs(value ?? 0)));
  const most = name === 'advantage' ? Math.max(own, largestAdvantage()) : own; // so that colours mean the same in all samples
  const hue = (value) => (name === 'advantage' ? (value < 0 ? '--bad' : '--good') : name === 'diff' ? '--bad' : '--heat');
  const share = (value) => (name === 'logprob' ? Math.min(1, -value / Math.min(most, 5)) : Math.abs(value) / most);
  const token = (text, i) => {
    const value = values[i];
    const span = h('span', { class: value === null || value === undefined ? 'token observed' : 'token', title: tokenTitle(tokens, i) }, visible(text));
    if (value !== null && value !== undefined) span.style.backgroundColor = `color-mix(in srgb, var(${hue(value)}) ${Math.round(STRONGEST[isDark() ? 'dark' : 'light'] * share(value))}%, transparent)`;
    return span;
  };
  return h('pre', { class: 'text tokens', dir: 'auto' }, tokens.text.map(token));
}
const largestAdvantage = lazily(() => cells('advantage').reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0));
const tokenTitle = (tokens, i) => [JSON.stringify(tokens.text[i]), ...Object.keys(PAINTS).filter((name) => Array.isArray(tokens[name])).map((name) => `${PAINTS[name]} ${figure(tokens[name][i])}`)].join('\n');

function answerLine(row, onlyExpected = false) {
  const answer = cell(row, 'answer');
  const expected = cell(row, 'expected_answer');
  if (answer === null && (expected === null || expected === '')) return null;
  const said = (word, text) => [`${word} `, h('b', {}, h('bdi', {}, text === null ? 'none' : brief(text, 300)))];
  return h('p', { class: 'answer' }, !onlyExpected && said('answer', answer), expected !== null && [!onlyExpected && ' · ', ...said('expected', expected)]);
}

function breakdown(row) {
  const parts = columnNames.filter((name) => name.startsWith('reward/') && typeof cell(row, name) === 'number');
  if (!parts.length) return null;
  const most = Math.max(...parts.map((name) => Math.abs(cell(row, name))), 1e-9);
  return h('div', { class: 'parts' }, parts.map((name) => {
    const value = cell(row, name);
    const bar = h('i', { class: value < 0 ? 'below' : '' });
    bar.style.width = `${(50 * Math.abs(value)) / most}%`;
    return h('div', {}, h('span', {}, visible(name.slice(7))), h('span', { class: 'track' }, bar), h('b', {}, figure(value)));
  }));
}

function otherColumns(row) {
  const shown = new Set([...BASIC, 'messages', 'conversation', 'tokens', 'answer', 'expected_answer', 'run']);
  const rest = columnNames.filter((name) => !shown.has(name) && !name.startsWith('reward/') && cell(row, name) !== null && cell(row, name) !== '');
  const lead = (name) => (name.startsWith('extra/') ? 0 : name.startsWith('example/') ? 1 : 2);
  rest.sort((a, b) => lead(a) - lead(b));
  return h('dl', { class: 'columns' }, rest.map((name) => h('div', {}, h('dt', {}, visible(name)), h('dd', {}, h('bdi', {}, brief(figure(cell(row, name)), 400))))));
}

function siblingsBody(siblings, row) {
  const best = saidText(siblings[0]);
  const stored = cell(row, 'group_size') || siblings.length;
  const against = (text) => (shown) => marked(best.slice(0, Math.max(MOST_CHARACTERS, text.length)), shown);
  return h('div', { class: 'body' }, ...promptTurns(row),
    h('p', { class: 'note' }, stored > siblings.length ? `${siblings.length} of ${stored} siblings are stored; metrics.keep_all_rows stores all. ` : '',
      siblings.length > 1 ? ['Best first. ', h('mark', {}, 'Marked'), ' words (in long answers: lines) are not in the best sample; ', h('del', {}, '‸'), ' shows where the best sample has more words.'] : 'This prompt has one sample.'),
    h('div', { class: 'siblings' }, siblings.slice(0, MANY).map((one, place) => h('div', { class: one === row ? 'sibling open' : 'sibling', 'data-sibling': one },
      facts(`sample ${cell(one, 'sample_idx')}`, h('b', {}, figure(cell(one, 'reward'))), verdictSign(cell(one, 'correct')), `${figure(cell(one, 'response_tokens'))} tokens`),
      textBlock(saidText(one), place ? against(saidText(one)) : undefined)))));
}

function historyBody(history) {
  const byStep = sorted([...history], 'step', false);
  const shown = byStep.slice(-MANY);
  const points = byStep.filter((row) => typeof cell(row, 'reward') === 'number').map((row) => [cell(row, 'step'), cell(row, 'reward'), cell(row, 'correct')]);
  const steps = new Set(points.map((point) => point[0]));
  return h('div', { class: 'body' }, ...promptTurns(byStep[0]),
    steps.size > 1 && pointsCard('Reward of this prompt by step', points, 'each stored sample', (point) => correctColor(point[2]), 150),
    h('p', { class: 'note' }, byStep.length > shown.length ? `The latest ${MANY} of ${byStep.length}. ` : '', h('mark', {}, 'Marked'), ' words are not in the previous sample.'),
    h('div', { class: 'history' }, shown.map((row, place) => h('div', { class: 'sibling', 'data-step': cell(row, 'step') },
      facts(`step ${cell(row, 'step')}`, h('b', {}, figure(cell(row, 'reward'))), verdictSign(cell(row, 'correct')), `${figure(cell(row, 'response_tokens'))} tokens`),
      textBlock(saidText(row), place ? (text) => marked(saidText(shown[place - 1]), text) : undefined)))));
}
const correctColor = (value) => (value === true ? palette(2) : value === false ? palette(5) : palette(0));

/** The nodes of `text`. Words that `base` does not have at that place are marked. */
function marked(base, text) {
  const words = (whole) => whole.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) || [];
  const lines = (whole) => whole.match(/[^\n]*\n|[^\n]+/g) || [];
  const long = base.includes('\n') && text.includes('\n') && (words(base).length > LONG || words(text).length > LONG);
  const split = long ? lines : words; // words of long answers would all be marked
  const [a, b] = [split(base), split(text)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const middle = compared(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const pieces = [{ text: b.slice(0, start).join('') }, ...middle, { text: b.slice(b.length - end).join('') }];
  return pieces.filter((piece) => piece.text || piece.less).map((piece) => (piece.less ? h('del', { title: visible(piece.less) }, '‸') : piece.more ? h('mark', {}, visible(piece.text)) : visible(piece.text)));
}
/** Pieces of `b`: {text} in both, {text, more} only in `b`, {less} only in `a`. */
function compared(a, b) {
  if (!a.length && !b.length) return [];
  if (!a.length) return [{ text: b.join(''), more: true }];
  if (!b.length) return [{ less: a.join('') }];
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return [{ less: a.slice(0, 50).join('') }, { text: b.join(''), more: true }];
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
    common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
  }
  const pieces = [];
  const put = (kind, word) => {
    const last = pieces[pieces.length - 1];
    if (last && last.kind === kind) last[kind === 'less' ? 'less' : 'text'] += word;
    else pieces.push(kind === 'less' ? { kind, less: word } : { kind, text: word, more: kind === 'more' });
  };
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    if (i < a.length && j < b.length && a[i] === b[j]) { put('same', b[j]); i++; j++; }
    else if (j < b.length && (i >= a.length || common[i * width + j + 1] >= common[(i + 1) * width + j])) put('more', b[j++]);
    else put('less', a[i++]);
  }
  return pieces;
}
