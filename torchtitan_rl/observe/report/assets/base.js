// Shared by all views: the data, the page's state, building elements, formatting numbers.

const data = JSON.parse(document.getElementById('data').textContent);
const runs = data.runs;
const run = runs[0];
const several = runs.length > 1; // the page compares runs

/** Creates an element. Strings become text nodes, so a model's output is never parsed as markup. */
function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (none(value) || value === false) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'class') element.className = value;
    else if (name === 'value' || name === 'checked') element[name] = value;
    else if (name === 'color') element.style.setProperty('--c', value);
    else element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat().filter((child) => !none(child) && child !== false));
  return element;
}

const none = (value) => value === null || value === undefined;
const replace = (element, ...children) => element.replaceChildren(...children.flat().filter(Boolean));

// ---- rows ----

/** A row's cell; null if it has none. Rows are known by their number. */
const cell = (row, name) => data.rows[row][name] ?? null;
/** All cells of a column, one for each row. */
const cells = (name) => data.rows.map((_, row) => cell(row, name));
const columnNames = [...new Set(data.rows.flatMap((row) => Object.keys(row)))];

const lazily = (make) => { let made; return () => (made ??= make()); };
const groupKey = (row) => ['run', 'table', 'split', 'step', 'prompt_idx'].map((name) => cell(row, name)).join('\u0000');
/** A held-out prompt by its number, as its text may differ from sample to sample; one of training by its text. */
const promptKey = (row) => ['run', 'table', 'split', cell(row, 'split') === 'train' ? 'prompt' : 'prompt_idx'].map((name) => cell(row, name)).join('\u0000');
const groups = lazily(() => Map.groupBy(data.rows.keys(), groupKey));
const prompts = lazily(() => Map.groupBy(data.rows.keys(), promptKey));
/** A row's name in links: that of its episode, which stays when the run grows. */
const nameOf = (row) => cell(row, 'episode_id');

/** Notes that the page has not all samples; none if it has. */
const moreNotes = () => [
  ...runs.flatMap((one) => one.notes.map((note) => (several ? `${one.name}: ${note}` : note))),
  data.left > 0 && `${data.left.toLocaleString('en')} more samples do not fit this page: write it with a larger --size. Here are the selected samples and randomly chosen whole groups.`,
].filter(Boolean).map((text) => h('p', { class: 'note', 'data-more': '' }, text));

/** The text of a role's last message in a column of messages, else that of another column. */
function lastOf(row, column, role, otherwise) {
  const last = [cell(row, column)].flat().findLast((one) => one?.role === role);
  return typeof last?.content === 'string' ? last.content : cell(row, otherwise);
}
/** What a row was asked: the last user message of a chat, else the prompt. */
const question = (row) => lastOf(row, 'messages', 'user', 'prompt');
/** What the policy said last: its last turn of a conversation, else the response. */
const lastSaid = (row) => lastOf(row, 'conversation', 'assistant', 'response');
/** All that was said after the prompt, as one text: a conversation's messages with their roles, else the response. */
function saidText(row) {
  const said = cell(row, 'conversation');
  if (!Array.isArray(said) || !said.length) return String(cell(row, 'response') ?? '');
  const text = (message) => (typeof message?.content === 'string' ? message.content : JSON.stringify(message?.content ?? message));
  return said.map((message) => `${[message?.role, message?.name].filter(Boolean).join(' ')}: ${text(message)}`).join('\n');
}
/** All texts of each row in lower case, for the search: also its name, messages of tools and environments, and what rewards logged. */
const searchTexts = lazily(() => data.rows.map((_, row) => {
  const messages = [cell(row, 'messages'), cell(row, 'conversation')].flat(); // a user's own table may have no list there
  const said = messages.map((one) => (typeof one?.content === 'string' ? one.content : JSON.stringify(one ?? '')));
  const logged = columnNames.filter((name) => name.startsWith('extra/')).map((name) => cell(row, name)).filter((value) => value !== null);
  const texts = [...TEXTS.map((name) => cell(row, name) ?? ''), ...logged].map((value) => (typeof value === 'object' ? JSON.stringify(value) : String(value)));
  return [nameOf(row), ...texts, ...said].join('\n').toLowerCase();
}));

// ---- state: stored in the URL, so that a reload (or a link) restores the same view ----

const DEFAULTS = {
  view: 'overview', series: '', q: '', split: 'auto', run: '', from: '', to: '', low: '', high: '',
  right: '', finish: '', shown: false, sort: '', down: true, page: 0, open: '', tab: 'sample', paint: '',
  tokensOpen: false, kind: '',
};
const state = {};
/** Reads the state from the address. What is not a state of ours keeps its default. */
function readState() {
  let asked = {};
  try { asked = JSON.parse(decodeURIComponent(location.hash.slice(1)) || '{}'); } catch { /* not an address of ours */ }
  const fits = (value, expected) => typeof value === typeof expected && Array.isArray(value) === Array.isArray(expected);
  for (const [name, expected] of Object.entries(DEFAULTS)) state[name] = fits(asked?.[name], expected) ? asked[name] : structuredClone(expected);
}
readState();
function remember() {
  const changed = Object.entries(state).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(DEFAULTS[name]));
  const hash = changed.length ? '#' + encodeURIComponent(JSON.stringify(Object.fromEntries(changed))) : '#';
  try { history.replaceState(null, '', hash); } catch { /* some viewers forbid it: only the position is lost */ }
}
/** Called before the reader goes elsewhere: the browser's Back then leads here again. */
function leave() {
  try { history.pushState(null, '', location.href); } catch { /* some viewers forbid it */ }
}

// ---- text ----

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
/** The text with invisible and direction characters replaced by visible symbols. */
function visible(text) {
  return String(text ?? '').replace(/\r\n/g, '\n').replace(CONTROL, (character) => {
    const code = character.codePointAt(0);
    if (code < 32) return String.fromCharCode(0x2400 + code);
    return code === 127 ? '\u2421' : `[U+${code.toString(16).toUpperCase().padStart(4, '0')}]`;
  });
}
/** The text on one line, at most `most` characters. */
function brief(text, most = 160) {
  const line = visible(String(text ?? '').slice(0, 4 * most)).replace(/\s+/g, ' ').trim();
  return line.length > most ? line.slice(0, most - 1) + '…' : line;
}
function figure(value) {
  if (none(value)) return '–';
  if (typeof value !== 'number') return typeof value === 'string' ? value : JSON.stringify(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString('en');
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1);
  return size >= 1000 ? Math.round(value).toLocaleString('en') : String(Number(value.toPrecision(3)));
}
const percent = (value) => (none(value) ? '–' : `${(100 * value - ((100 * value) % 1 === 0.25 ? 0.01 : 0)).toFixed(1)} %`); // 56.25 is 56.2, as in the lines of the overview
/** A name that may be broken after its separators. */
const breakable = (name) => h('span', {}, visible(name).split(/(?<=[._/])/).flatMap((part) => [part, h('wbr', {})]));
/** A duration. Example: 0.00584 as "6 ms". */
const seconds = (value) => (value >= 1 ? `${figure(value)} s` : value >= 0.001 ? `${Math.round(1000 * value)} ms` : 'under 1 ms');
const plural = (count, word) => `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;

/** A listener that calls on Enter or space, for rows that can be opened. */
const onEnter = (call) => (event) => { if (event.target === event.currentTarget && (event.key === 'Enter' || event.key === ' ')) { event.preventDefault(); call(); } };
/** Debounces `call`: runs it `ms` milliseconds after the last request. */
function later(call, ms) {
  let timer;
  return (...args) => { clearTimeout(timer); timer = setTimeout(() => call(...args), ms); };
}

/** A labelled select element that writes to the state. */
function choice(label, name, options, changed) {
  return h('label', { class: 'field' }, h('span', {}, label),
    h('select', { 'data-field': name, onchange: (event) => { state[name] = event.target.value; changed(); } },
      options.map(([value, text]) => h('option', { value, selected: String(value) === String(state[name]) }, text))));
}
/** An input element that writes to the state. */
function entry(name, changed, props) {
  const later_ = later(changed, 150);
  return h('input', { 'data-field': name, value: state[name], ...props, oninput: (event) => { state[name] = event.target.value; later_(); } });
}
/** A labelled input. */
const input = (label, name, type, changed, extra) => h('label', { class: `field ${type}` }, h('span', {}, label), entry(name, changed, { type, ...extra }));
/** Two number inputs for a column's bounds. */
function bounds(label, [low, high], changed) {
  const end = (name, word) => entry(name, changed, { type: 'number', step: 'any', placeholder: word, 'aria-label': `${label} ${word}` });
  return h('div', { class: 'field bounds' }, h('span', {}, label), h('div', {}, end(low, 'from'), end(high, 'to')));
}
const SHORT = 12; // characters of a cell that is never broken, such as "100.0 %"
function table(headers, lines, props) {
  return h('div', { class: 'scroll', tabindex: 0, role: 'group', 'aria-label': 'table' }, h('table', { class: 'plain', ...props },
    h('thead', {}, h('tr', {}, headers.map((header) => h('th', {}, header)))),
    h('tbody', {}, lines.map((line) => h('tr', {}, line.map((one) => h('td', { class: typeof one === 'string' && one.length <= SHORT && 'short' }, one)))))));
}
const facts = (...parts) => h('div', { class: 'facts' }, parts.flat().filter(Boolean).map((part) => (typeof part === 'string' ? h('span', {}, visible(part)) : part)));
const section = (title, note, ...children) => h('section', {},
  h('h2', {}, title), note && h('p', { class: 'note' }, note), ...children);
