// One sample: its conversation, its numbers, its siblings, and its prompt over training.

const MOST_CHARACTERS = 6000; // characters of a text shown before "show all"
const MOST_COMPARED = 4e6; // pairs of words; longer texts are marked as a whole where they differ
const LEAST_COMMON = 0.25; // share of the shorter text's words: if two have fewer in common, no difference is marked
const IS_WORD = /[\p{L}\p{N}]/u;
const MANY = 60; // siblings, or steps of one prompt, shown

function openSample(detail, row) {
  opened = row;
  state.open = nameOf(row);
  const siblings = sorted([...(groups().get(groupKey(row)) || [row])], 'reward', true);
  const history = prompts().get(promptKey(row)) || [row];
  if (!['sample', 'siblings', 'history'].includes(state.tab)) state.tab = 'sample';
  const tabs = [['sample', 'Sample'], ['siblings', `Siblings ${siblings.length}${cell(row, 'group_size') > siblings.length ? ` of ${cell(row, 'group_size')}` : ''}`], ['history', `Over training ${new Set(history.map((one) => cell(one, 'step'))).size}`]];
  const body = { sample: () => sampleBody(row), siblings: () => siblingsBody(siblings, row), history: () => historyBody(history) }[state.tab]();
  const where = [cell(row, 'run'), `step ${figure(cell(row, 'step'))}`, cell(row, 'split'), cell(row, 'prompt_idx') !== null && `prompt ${cell(row, 'prompt_idx')}`,
    cell(row, 'group_size') > 1 && `sample ${cell(row, 'sample_idx')} of ${cell(row, 'group_size')}`].filter(Boolean);
  replace(detail,
    h('header', {}, h('button', { class: 'back', onclick: closeSample }, '‹ list'), h('span', { class: 'facts' }, where.map(visible).join(' · ')), badges(row)),
    h('div', { class: 'tabs', role: 'tablist' }, tabs.map(([name, title]) => h('button', {
      role: 'tab', 'aria-selected': String(state.tab === name), 'data-tab': name, onclick: () => { state.tab = name; openSample(detail, row); },
    }, title))),
    body);
  detail.parentNode.classList.add('opened');
  for (const line of document.querySelectorAll('table.samples tr[data-row]')) {
    const open = Number(line.dataset.row) === row;
    line.classList.toggle('open', open);
    if (open) line.setAttribute('aria-current', 'true'); else line.removeAttribute('aria-current');
  }
  remember();
}
function closeSample() {
  opened = null;
  state.open = '';
  document.querySelector('.split')?.classList.remove('opened');
  document.querySelector('tr.open')?.classList.remove('open');
  remember();
}

function badges(row) {
  const reason = cell(row, 'select_reason');
  const correct = cell(row, 'correct');
  return h('span', { class: 'badges' },
    h('span', { class: 'badge' }, 'reward ', h('b', {}, figure(cell(row, 'reward')))),
    cell(row, 'advantage') !== null && h('span', { class: 'badge' }, 'advantage ', h('b', {}, figure(cell(row, 'advantage')))),
    correct !== null && h('span', { class: `badge ${correct ? 'good' : 'bad'}` }, correct ? 'right' : 'wrong'),
    cell(row, 'finish_reason') && h('span', { class: `badge ${cell(row, 'finish_reason') === 'stop' ? '' : 'warn'}` }, visible(cell(row, 'finish_reason'))),
    cell(row, 'left_out') && h('span', { class: 'badge warn' }, `not in the loss: ${visible(cell(row, 'left_out'))}`),
    reason && reason !== 'sibling' && h('span', { class: 'badge quiet', title: 'the selectors of metrics.select that chose it' }, visible(reason)));
}

/** A text block. A long text is cut until the reader asks for all of it. `write` makes the nodes of a text. */
function textBlock(text, write = (shown) => [visible(shown)]) {
  const whole = String(text ?? '');
  const block = h('pre', { class: 'text' });
  const show = (all) => replace(block, ...write(all ? whole : whole.slice(0, MOST_CHARACTERS)),
    !all && whole.length > MOST_CHARACTERS && h('button', { class: 'more', onclick: () => show(true) }, `show all ${whole.length.toLocaleString('en')} characters`));
  show(false);
  block.dir = 'auto'; // after its children, of which there may be many
  if (!whole) block.append(h('em', {}, 'empty'));
  return block;
}
/** A turn, which can be folded to one line: `facts` beside its role stay. */
const turn = (role, facts_, gist, ...content) => h('details', { open: true, class: `turn ${['system', 'user', 'assistant', 'tool'].find((one) => role.startsWith(one)) || ''}` },
  h('summary', {}, h('span', { class: 'role' }, visible(role)), ...facts_, h('span', { class: 'gist' }, brief(gist, 80))), ...content);

/** A message of a conversation. `number`: of the policy's turn; 0 for other roles. */
function messageTurn(message, number = 0) {
  const said = typeof message?.content === 'string' ? message.content : JSON.stringify(message?.content ?? message, null, 1);
  const earned = ['reward', 'advantage'].map((name) => typeof message?.[name] === 'number' && h('span', { class: `badge ${message[name] < 0 ? 'bad' : message[name] > 0 ? 'good' : ''}` }, `${name} `, h('b', {}, figure(message[name]))));
  const logged = Object.entries(message?.logged ?? {}).filter(([, value]) => value).map(([name, value]) => h('span', { class: name.includes('error') || name === 'invalid' ? 'badge bad' : 'badge' }, `${visible(name.replaceAll('_', ' '))} ${visible(figure(value))}`));
  const badges_ = [...earned, ...logged].filter(Boolean);
  const element = turn([message?.role ?? 'message', message?.name].filter(Boolean).join(' '), [number > 0 && h('span', { class: 'role' }, ` · turn ${number}`), typeof message?.trace === 'number' && h('span', { class: 'role' }, ` · trace ${message.trace}`), badges_.length > 0 && h('span', { class: 'badges' }, badges_)], said, textBlock(said), message?.tool_calls && textBlock(JSON.stringify(message.tool_calls, null, 1)));
  if (isToolError(message)) element.classList.add('error');
  return element;
}

const isToolError = (message) => message?.role === 'tool' && typeof message.content === 'string' && /^error\b/i.test(message.content);
/** The conversation in numbers: turns, calls, errors, seconds of waiting for tools, tokens that others wrote. */
function conversationCards(row, said) {
  const sum = (name) => said.reduce((total, message) => total + (Number(message?.logged?.[name]) || 0), 0);
  const errors = Math.max(sum('tool_errors'), said.filter(isToolError).length);
  const waiting = cell(row, 'environment_seconds');
  const cards = [['turns', said.filter((message) => message?.role === 'assistant').length], ['tool calls', Math.max(sum('tool_calls'), said.filter((message) => message?.role === 'tool').length)], ['tool errors', errors, errors > 0], Array.isArray(cell(row, 'traces')) && ['traces', cell(row, 'traces').length],
    typeof waiting === 'number' && ['waiting', seconds(waiting)], cell(row, 'observed_tokens') && ['tokens of others', figure(cell(row, 'observed_tokens'))]].filter(Boolean);
  return h('dl', { class: 'cards' }, cards.map(([name, value, bad]) => h('div', { class: bad ? 'bad' : '' }, h('dt', {}, name), h('dd', {}, String(value)))));
}
/** Buttons that go to the next turn and to the next error. */
function conversationTools(said) {
  const all = (selector) => [...document.querySelectorAll(`.body > .turn${selector}`)];
  const see = (one) => { one.open = true; one.scrollIntoView({ block: 'start' }); one.querySelector('summary').focus({ preventScroll: true }); };
  const next = (selector) => () => {
    const [turns, now] = [all(selector), document.activeElement.closest?.('.turn') || lastSeen];
    const after = turns.find((one) => !now?.isConnected || now.compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING) || turns[0];
    if (after) see(lastSeen = after);
  };
  let lastSeen = null;
  return h('div', { class: 'paints' }, h('button', { class: 'chip', 'data-next': 'turn', title: 'key n', onclick: next('.assistant') }, 'next turn'),
    said.some(isToolError) && h('button', { class: 'chip', 'data-next': 'error', title: 'key e', onclick: next('.error') }, 'next error'));
}
/** Where a trace of a rollout comes from, and the context that it begins with. */
function traceOpening(number, trace) {
  const context = Array.isArray(trace.context) ? trace.context : [];
  return h('details', { class: 'rendered opening' }, h('summary', {}, `trace ${number} · from trace ${trace.parent} · ${visible(brief(trace.reason || 'a new context', 120))} · ${plural(context.length, 'message')}, ${figure(trace.context_tokens)} tokens`), ...context.map((message) => messageTurn(message)));
}

/** The messages in the order of time, as a tree: a trace is further in than the one that it came from. Before its first message stands how it began. */
function conversationTurns(said, traces) {
  const seen = new Set([0]);
  const depth = (trace, parent = traces?.[trace]?.parent ?? trace) => (parent < trace ? 1 + depth(parent) : 0);
  let number = 0;
  return said.flatMap((message) => {
    const trace = message?.trace;
    const opens = Array.isArray(traces) && typeof trace === 'number' && traces[trace] && !seen.has(trace);
    seen.add(trace);
    const shown = [opens && traceOpening(trace, traces[trace]), messageTurn(message, message?.role === 'assistant' ? ++number : 0)].filter(Boolean);
    for (const one of shown) one.style.marginLeft = `${16 * Math.min(depth(trace), 6)}px`;
    return shown;
  });
}

/** The prompt as turns if it was a chat, else as the text that the policy read. */
function promptTurns(row) {
  const messages = cell(row, 'messages');
  if (!Array.isArray(messages) || !messages.length) return [turn('prompt', [], cell(row, 'prompt'), textBlock(cell(row, 'prompt')))];
  return [...messages.map((message) => messageTurn(message)),
    h('details', { class: 'rendered' }, h('summary', {}, 'as the policy read it'), textBlock(cell(row, 'prompt')))];
}

function sampleBody(row) {
  const role = Array.isArray(cell(row, 'messages')) ? 'assistant' : 'response';
  const said = cell(row, 'conversation');
  const response = Array.isArray(said) ? [...conversationTurns(said, cell(row, 'traces')), h('details', { class: 'rendered', open: state.tokensOpen, ontoggle: (event) => { state.tokensOpen = event.target.open; remember(); } }, h('summary', {}, 'as tokens'), responseBlock(row))] : [turn(role, [], cell(row, 'response'), responseBlock(row))];
  return h('div', { class: 'body' }, Array.isArray(said) && conversationCards(row, said), Array.isArray(said) && conversationTools(said), ...promptTurns(row), ...response, answerLine(row, cell(row, 'unfinished') && cell(row, 'reward') === null), ...otherColumns(row));
}

const PAINTS = { logprob: 'log-probability', diff: 'trainer − sampler', entropy: 'entropy', divergence: 'divergence from the teacher', advantage: 'advantage', age: 'age in updates' };
const paintName = (name) => PAINTS[name] || visible(name.replaceAll('_', ' '));
const WORDS = new Set(['text', 'teacher_token']); // what tokens have that is no number
/** The ends of a colour scale in words, by what the strongest colour stands for. */
const SCALES = {
  logprob: (most) => ['0, certain', `−${figure(most)} nats or less`], diff: (most) => ['0', `${figure(most)} nats apart`],
  advantage: (most) => [figure(-most), `+${figure(most)}, the largest of the run`], age: (most) => ['0', `${figure(most)} updates older`],
};
/** The response. If its tokens are stored, they can be coloured. */
function responseBlock(row) {
  const tokens = spreadTokens(cell(row, 'tokens'));
  const names = [...new Set([...Object.keys(PAINTS), ...Object.keys(tokens ?? {})])]; // a run may store values that this page does not know
  const known = Array.isArray(tokens?.text) ? names.filter((name) => Array.isArray(tokens[name]) && tokens[name].some((value) => typeof value === 'number')) : [];
  if (!known.length) return textBlock(cell(row, 'response'));
  const plain = textBlock(cell(row, 'response'));
  const chips = ['', ...known].map((name) => h('button', { class: 'chip', 'data-paint': name || 'none', onclick: () => { state.paint = name; remember(); paint(); } }, name ? paintName(name) : 'no colours'));
  const holder = h('div', {}, h('div', { class: 'paints' }, chips), plain);
  let painted;
  const paint = () => {
    for (const chip of chips) chip.setAttribute('aria-pressed', String(chip.dataset.paint === (state.paint || 'none')));
    plain.hidden = known.includes(state.paint);
    if (plain.hidden) (painted ??= tokenBlock(row, tokens)).paint(state.paint);
    if (painted) painted.hidden = !plain.hidden;
    if (painted && !painted.parentNode) holder.append(painted);
  };
  paint();
  return holder;
}
/** The tokens with an advantage each: a single advantage is copied to every token that the policy sampled. */
function spreadTokens(tokens) {
  if (!tokens || typeof tokens.advantage !== 'number') return tokens;
  return { ...tokens, advantage: (tokens.logprob || []).map((value) => (value === null ? null : tokens.advantage)) };
}
const LEVELS = 64; // shades of a colour
const shades = h('style', {});
document.head.append(shades);
const STRONGEST = { light: 65, dark: 45 }; // percent of colour behind a token; its text stays readable
/** The tokens, the colours' scale, and the values of the token that the reader chooses by click, touch or arrow keys. `paint(name)` colours them. */
function tokenBlock(row, tokens) {
  const spans = tokens.text.map((text) => { const span = document.createElement('span'); span.textContent = visible(text); return span; });
  const values = h('div', { class: 'token-values', 'aria-live': 'polite' }, h('p', { class: 'note' }, 'Click a token, or use the arrow keys, for its values.'));
  let chosen = -1;
  const choose = (place) => {
    if (!spans[place]) return;
    spans[chosen]?.classList.remove('chosen');
    chosen = place;
    spans[chosen].classList.add('chosen');
    spans[chosen].scrollIntoView({ block: 'nearest' });
    replace(values, h('dl', { class: 'columns' }, tokenFacts(row, tokens, chosen).map(([word, value]) => h('div', {}, h('dt', {}, word), h('dd', {}, visible(value))))));
  };
  const goes = { ArrowRight: () => chosen + 1, ArrowLeft: () => chosen - 1, Home: () => 0, End: () => spans.length - 1 };
  const block = h('pre', { class: 'text tokens', tabindex: 0, role: 'group', 'aria-label': 'tokens of the response: arrow keys choose one', onclick: (event) => choose(spans.indexOf(event.target)),
    onkeydown: (event) => { if (goes[event.key]) { event.preventDefault(); choose(goes[event.key]()); } } }, spans);
  block.dir = 'auto'; // after its children: else each of them is searched for a direction again
  const scale = h('p', { class: 'note scale' });
  const paint = (name) => {
    const own = tokens[name].reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 1e-12);
    const most = name === 'advantage' ? Math.max(own, largestAdvantage()) : name === 'logprob' ? Math.min(own, 5) : own; // colours mean the same in all samples
    const [bad, good, heat] = ['--bad', '--good', '--heat'].map(cssColor);
    const signed = name === 'advantage' || (!SCALES[name] && tokens[name].some((value) => value < 0));
    const hue = (value) => (signed ? (value < 0 ? bad : good) : name === 'diff' ? bad : heat);
    const shade = (part) => faint(hue(part), (STRONGEST[DARK.matches ? 'dark' : 'light'] / 100) * Math.abs(part));
    // A class for each shade: the styles of 20,000 tokens would take longer than all else together.
    shades.textContent = Array.from({ length: 2 * LEVELS + 1 }, (_, i) => `.shade${i - LEVELS} { background: ${shade(i / LEVELS - 1)} }`).join('\n');
    spans.forEach((span, i) => {
      const value = tokens[name][i];
      span.className = none(value) ? 'token observed' : `token shade${Math.round(LEVELS * Math.max(-1, Math.min(1, value / most)))}`;
    });
    spans[chosen]?.classList.add('chosen');
    const bar = h('i', {});
    bar.style.background = `linear-gradient(90deg, ${signed ? shade(-1) + ', ' : ''}transparent, ${shade(1)})`;
    const [low, high] = SCALES[name]?.(most) ?? [signed ? figure(-most) : '0', `${figure(most)}${PAINTS[name] ? ' nats' : ''}`];
    replace(scale, low, bar, high, tokens[name].some(none) && h('span', {}, 'grey: no value, as for text that the policy did not write'));
  };
  return Object.assign(h('div', {}, scale, block, values), { paint });
}
const largestAdvantage = lazily(() => cells('advantage').reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0));
/** How many characters or words two texts or lists have in common at the start. */
function prefix(a, b) {
  let length = 0;
  while (length < a.length && length < b.length && a[length] === b[length]) length++;
  return length;
}
const digits = (value) => String(Number(value.toPrecision(6)));
/** The values of one token, as [name, text] pairs. What is not stored is left out. */
function tokenFacts(row, tokens, i) {
  const at = (name) => (typeof tokens[name]?.[i] === 'number' ? tokens[name][i] : null);
  const [logprob, diff] = [at('logprob'), at('diff')];
  const why = logprob === null ? 'not written by the policy' : cell(row, 'left_out') || (cell(row, 'split') === 'train' ? 'its sample is not' : 'an evaluation');
  return [['token', JSON.stringify(tokens.text[i])], ['place', `${figure(i + 1)} of ${figure(tokens.text.length)}`],
    logprob !== null && ['probability', digits(Math.exp(logprob))], logprob !== null && ['sampler’s log-prob', figure(logprob)],
    diff !== null && ['trainer’s log-prob', figure(logprob + diff)], diff !== null && ['trainer − sampler', figure(diff)], diff !== null && ['ratio trainer / sampler', digits(Math.exp(diff))],
    ...Object.entries(tokens).filter(([name, values]) => !SCALES[name] && !WORDS.has(name) && Array.isArray(values) && !none(values[i])).map(([name, values]) => [paintName(name), figure(values[i])]), typeof tokens.teacher_token?.[i] === 'string' && ['teacher’s best', JSON.stringify(tokens.teacher_token[i])],
    at('advantage') !== null && ['advantage', figure(at('advantage'))],
    ['in the loss', cell(row, 'in_loss') && logprob !== null ? 'yes' : `no: ${why}`],
    typeof cell(row, 'policy_version') === 'number' && logprob !== null && ['policy version', figure(cell(row, 'policy_version') - (at('age') ?? 0))]].filter(Boolean);
}

function answerLine(row, onlyExpected = false) {
  const answer = cell(row, 'answer');
  const expected = cell(row, 'expected_answer');
  if (answer === null && (expected === null || expected === '')) return null;
  const said = (word, text) => [`${word} `, h('b', {}, h('bdi', {}, text === null ? 'none' : brief(text, 300)))];
  return h('p', { class: 'answer' }, !onlyExpected && said('answer', answer), expected !== null && [!onlyExpected && ' · ', ...said('expected', expected)]);
}

function otherColumns(row) {
  const shown = new Set([...BASIC, 'table', 'prompt_idx', 'sample_idx', 'group_size', 'select_reason', 'advantage', 'left_out', 'episode_id', 'messages', 'conversation', 'traces', 'tokens', 'answer', 'expected_answer']);
  const rest = columnNames.filter((name) => !shown.has(name) && cell(row, name) !== null && cell(row, name) !== '');
  const lead = (name) => ['reward/', 'extra/', 'example/', ''].findIndex((start) => name.startsWith(start));
  rest.sort((a, b) => lead(a) - lead(b));
  const whole = (value) => (value !== null && typeof value === 'object' ? JSON.stringify(value, null, 1) : figure(value));
  const short = (value) => (Number.isSafeInteger(value) ? value.toLocaleString('en') : figure(value)); // all digits of a name such as example/id
  const isLong = (text) => text.length > 80 || text.includes('\n');
  const isInner = (name) => lead(name) === 3; // of how it was made: policy_version, staleness
  const list = (names) => h('dl', { class: 'columns' }, names.map((name) => [name, JSON.stringify(cell(row, name)).length > 80 ? whole(cell(row, name)) : short(cell(row, name))]).map(([name, text]) => h('div', { class: isLong(text) && 'long' },
    h('dt', {}, visible(name)), h('dd', {}, isLong(text) ? textBlock(text) : h('bdi', {}, visible(text))))));
  return [list(rest.filter((name) => !isInner(name))), h('details', {}, h('summary', {}, 'how it was made'), list(rest.filter(isInner)))];
}

function siblingsBody(siblings, row) {
  const best = saidText(siblings[0]);
  const stored = cell(row, 'group_size') || siblings.length;
  const there = new Set(siblings.map((one) => cell(one, 'sample_idx')));
  const absent = Array.from({ length: stored }, (_, i) => i).filter((i) => stored > siblings.length && !there.has(i));
  const against = (text) => (shown) => marked(best.slice(0, Math.max(MOST_CHARACTERS, text.length)), shown);
  return h('div', { class: 'body' }, ...promptTurns(row),
    h('p', { class: 'note' }, absent.length > 0 ? `${siblings.length} of ${stored} siblings are ${data.left ? 'in this page' : 'stored'}. Not there: ${absent.length > 1 ? 'samples' : 'sample'} ${absent.join(', ')}; metrics.keep_all_rows stores all. ` : '',
      siblings.length > 1 ? ['Best first. ', h('mark', {}, 'Marked'), ': words that the best one does not have there. A sample with hardly a word in common has no marks.'] : absent.length === 0 && 'This prompt has one sample.'),
    h('div', { class: 'siblings' }, siblings.slice(0, MANY).map((one, place) => h('div', { class: one === row ? 'sibling open' : 'sibling', 'data-sibling': one },
      facts(`sample ${cell(one, 'sample_idx')}`, h('span', {}, 'reward ', h('b', {}, figure(cell(one, 'reward')))), verdictSign(cell(one, 'correct')), cell(one, 'advantage') !== null && h('span', {}, 'advantage ', h('b', {}, figure(cell(one, 'advantage')))),
        `${figure(cell(one, 'response_tokens'))} tokens`),
      textBlock(saidText(one), place ? against(saidText(one)) : undefined)))));
}

function historyBody(history) {
  const byStep = sorted([...history], 'step', false);
  const shown = byStep.slice(-MANY);
  return h('div', { class: 'body' }, ...promptTurns(byStep[0]),
    h('p', { class: 'note' }, byStep.length > shown.length ? `The latest ${MANY} of ${byStep.length}. ` : '', h('mark', {}, 'Marked'), ': not in the previous sample.'),
    h('div', { class: 'history' }, shown.map((row, place) => h('div', { class: 'sibling', 'data-step': cell(row, 'step') },
      facts(`step ${cell(row, 'step')}`, h('b', {}, figure(cell(row, 'reward'))), verdictSign(cell(row, 'correct')), `${figure(cell(row, 'response_tokens'))} tokens`),
      textBlock(saidText(row), place ? (text) => marked(saidText(shown[place - 1]), text) : undefined)))));
}

const wordsOf = (whole) => whole.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) || [];
/** Which words of `b` are in the longest sequence of words that it has in common with `a`. */
function inCommon(a, b) {
  const width = b.length + 1;
  const common = new Array(b.length).fill(false);
  if (a.length * width > MOST_COMPARED) return common;
  const length = new Uint16Array((a.length + 1) * width); // of the sequence from word i of `a` and word j of `b` on
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
  }
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { common[j++] = true; i++; } else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++; else j++;
  }
  return common;
}
/** The nodes of `text`, with the words marked that `base` does not have at that place; none if hardly one is in common. */
function marked(base, text) {
  const [a, b] = [wordsOf(base), wordsOf(text)];
  const start = prefix(a, b);
  const end = Math.min(prefix([...a].reverse(), [...b].reverse()), Math.min(a.length, b.length) - start);
  const common = b.map(() => true).toSpliced(start, b.length - start - end, ...inCommon(a.slice(start, a.length - end), b.slice(start, b.length - end)));
  const count = (words) => words.filter((word) => IS_WORD.test(word)).length;
  if (count(b.filter((_, i) => common[i])) < LEAST_COMMON * Math.min(count(a), count(b))) return [visible(text)];
  const pieces = []; // [text, whether it is in common]: a common piece without a letter or digit joins its neighbours
  b.forEach((word, i) => { if (pieces.at(-1)?.[1] === common[i]) pieces.at(-1)[0] += word; else pieces.push([word, common[i]]); });
  pieces.forEach((piece, i) => { if (i > 0 && i < pieces.length - 1 && !IS_WORD.test(piece[0])) piece[1] = false; });
  return pieces.map(([piece, isCommon]) => (isCommon ? visible(piece) : h('mark', {}, visible(piece))));
}
