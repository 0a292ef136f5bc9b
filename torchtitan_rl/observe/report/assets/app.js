// The page's frame: tabs and keyboard shortcuts.

const VIEWS = { overview: ['Overview', overview], samples: ['Samples', samples], prompts: ['Prompts', promptsPage], health: ['Health', healthPage] };
const main = h('main', { tabindex: -1 });

function show(view) {
  state.view = view in VIEWS ? view : 'overview';
  clearCharts();
  for (const tab of document.querySelectorAll('nav button')) tab.setAttribute('aria-selected', String(tab.dataset.view === state.view));
  VIEWS[state.view][1](main);
  main.dataset.view = state.view;
  remember();
}

/** Shows another view. Back leads to this one. */
function go(view) {
  if (view !== state.view) leave();
  show(view);
}

const errors = runs.flatMap((one) => one.warnings).filter((one) => one.level !== 'WARNING').length;
document.body.append(
  h('button', { class: 'skip', onclick: () => { main.focus(); main.scrollIntoView(); } }, 'skip to the content'),
  h('header', { class: 'top' },
    h('div', { class: 'title' }, h('h1', {}, visible(runs.map((one) => one.name).join(' · '))), h('small', {}, visible([run.config.config, run.environment.device, `made ${data.made}`].filter(Boolean).join(' · ')))),
    h('nav', { role: 'tablist', 'aria-label': 'pages' }, Object.entries(VIEWS).map(([view, [title]], place) => h('button', { role: 'tab', 'data-view': view, title: `key ${place + 1}`, onclick: () => { go(view); scrollTo(0, 0); } },
      title, view === 'samples' && h('small', {}, data.rows.length.toLocaleString('en')), view === 'health' && errors > 0 && h('small', { class: 'alarm' }, errors))))),
  main);
/** Shows what the address asks for. */
function arrive() {
  arrived = true;
  show(state.view);
}
arrive();
addEventListener('hashchange', () => { readState(); arrive(); });
DARK.addEventListener('change', () => show(state.view));

document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest('input:not([type=checkbox]), select, textarea');
  if (event.key === 'Escape') { if (typing) event.target.blur(); else closeSample(); return; }
  if (typing) return;
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (view) go(view);
  else if (state.view === 'samples' && (event.key === 'j' || event.key === 'k')) moveSample(event.key === 'j' ? 1 : -1);
  else if (event.key === 'n' || event.key === 'e') document.querySelector(`[data-next=${event.key === 'n' ? 'turn' : 'error'}]`)?.click();
  else if (event.key === '/') { event.preventDefault(); document.querySelector('input[type=search]')?.focus(); }
});
