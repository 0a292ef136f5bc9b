// The overview: what was asked, how the run ended, one held-out prompt before and after, then the curves and a search over all series.

const OUTCOME = [
  { title: 'Held-out accuracy', keys: [['evaluation/accuracy', 'greedy'], ['evaluation/sampled/accuracy', 'sampled']], band: ['evaluation/accuracy_low', 'evaluation/accuracy_high'], percent: true, points: true, note: 'band: 95 % interval' },
  { title: 'Held-out loss', keys: [['evaluation/loss', 'demonstrations']], points: true, note: 'nats per token' },
  { title: 'Divergence from the teacher', keys: [['teacher/divergence', 'exact'], ['evaluation/divergence', 'exact, held-out'], ['teacher/kl_k1', 'k1'], ['teacher/kl_k3', 'k3']], note: 'nats per token, on the policy’s own samples' },
  { title: 'Reward', keys: [['reward/mean', 'mean']], note: 'mean of rollouts' },
];
const TRAINING = [
  { title: 'Completion length', keys: [['completions/length/mean', 'mean']], band: ['completions/length/p05', 'completions/length/p95'], note: 'tokens; band: 5th to 95th percentile' },
  { title: 'Conversations', keys: [['conversations/turns/mean', 'turns'], ['conversations/tool_calls', 'tool calls'], ['conversations/tool_errors', 'tool errors']], note: 'mean of a conversation' },
  { title: 'Experts', keys: [['moe/largest_load', 'busiest / mean'], ['moe/dead_experts', 'without a token']], note: 'tokens of the busiest expert of a layer; experts that no token chose' },
  { title: 'Entropy', keys: [['policy/entropy', 'mean']], note: 'nats per token' },
  { title: 'KL', keys: [['policy/kl_k3', 'from the old policy'], ['reference/kl_k3', 'to the reference'], ['sampler/kl', 'from the sampler']], note: 'nats per token' },
  { title: 'Clip fractions', keys: [['ratio/clip_fraction_low', 'low'], ['ratio/clip_fraction_high', 'high'], ['sampler/corrected_fraction', 'sampler correction']], percent: true, note: 'of tokens' },
  { title: 'Log-prob difference', keys: [['sampler/logprob_diff/mean', 'mean'], ['sampler/logprob_diff/max', 'max']], log: true, note: 'trainer − sampler, nats; log scale' },
  { title: 'Gradient norm', keys: [['optimizer/grad_norm', 'norm']], note: 'before clipping' },
  { title: 'Groups', keys: [['groups/zero_variance_fraction', 'no signal'], ['groups/all_right_fraction', 'all right'], ['groups/all_wrong_fraction', 'all wrong']], percent: true, note: 'no signal: all rewards equal' },
  { title: 'Groups in flight', keys: [['in_flight/carried_tokens_fraction', 'carried tokens'], ['in_flight/carried_groups_fraction', 'carried groups']], percent: true, note: 'sampled in part by older weights' },
  { title: 'Truncated completions', keys: [['completions/clipped_fraction', 'truncated']], percent: true, note: 'ended by a limit, not by the policy' },
  { title: 'Tokens per second', keys: [['perf/step_tokens_per_s', 'whole step'], ['perf/generated_tokens_per_s', 'generation'], ['perf/trained_tokens_per_s', 'training']] },
  { title: 'Loss', keys: [['loss/policy', 'policy'], ['loss/kl_weighted', 'KL, weighted'], ['loss/entropy_weighted', 'entropy, weighted']] },
  { title: 'Diversity', keys: [['diversity/distinct_1/macro', 'distinct tokens'], ['diversity/distinct_2/macro', 'distinct pairs'], ['diversity/jaccard_distance/macro', 'between siblings']], note: 'within groups' },
  { title: 'Time of a step', keys: ['step', 'generate', 'grade', 'train', 'sync', 'evaluate'].map((name) => [`time/${name}`, name]), note: 'seconds' },
  { title: 'Memory', keys: [['perf/peak_memory_gib', 'peak']], note: 'GiB, fullest rank' },
];
const MORE = 24;
const allKeys = lazily(() => [...new Set(runs.flatMap((one) => Object.keys(one.series)))].sort());
const REWARDS = allKeys().filter((key) => /^reward\/[^/]+\/mean$/.test(key));
/** What several reward functions gave, and a chart for each number that one logs. */
const OWN = [
  { title: 'Reward functions', keys: REWARDS.length > 1 ? REWARDS.map((key) => [key, key.split('/')[1]]) : [], note: 'mean of each, before weights' },
  ...allKeys().filter((key) => key.startsWith('extra/') && !key.endsWith('/non_finite')).slice(0, MORE).map((key) => ({ title: key.slice(6), keys: [[key, 'mean']], note: 'logged by a reward function' })),
];
/** The cards of definitions. Where runs are compared, each metric has its own. */
const cardsOf = (definitions) => (several ? definitions.flatMap((one) => one.keys.map((pair, order) => ({ ...one, title: one.keys.length > 1 ? `${one.title}: ${pair[1]}` : one.title, keys: [pair], band: order ? null : one.band }))) : definitions).map(curveCard).filter(Boolean);

function overview(main) {
  const found = h('div', { class: 'grid' });
  const status = h('p', { class: 'note' });
  const search = () => { remember(); searchSeries(found, status); };
  const outcome = cardsOf(OUTCOME);
  const first = outcome.find((one) => one.isCurve);
  const training = cardsOf(TRAINING);
  const curves = [...outcome.filter((one) => one !== first), ...cardsOf(OWN), ...training.filter((one) => !one.still)];
  replace(main,
    h('section', { class: !several && first ? 'story' : '' }, h('div', { class: 'heads' }, runs.map(headline)), !several && first),
    several && h('div', { class: first ? 'story' : '' }, first, differencesOf()),
    example(),
    h('div', { class: 'bar' }, h('h2', {}, 'Curves')), h('div', { class: 'grid' }, curves),
    stillCards(training.filter((one) => one.still)),
    h('div', { class: 'bar' }, h('h2', {}, 'All series'), input('', 'series', 'search', search, { placeholder: 'part of a name, such as kl_k3', 'aria-label': 'search series', list: 'series' }), h('datalist', { id: 'series' }, allKeys().map((key) => h('option', { value: key })))),
    status, found);
  clearCharts();
  for (const one of [first, ...curves]) one?.draw();
  search();
}

/** Curves that do not move, folded, with their values. */
function stillCards(cards) {
  const open = (event) => { if (event.target.open) cards.forEach((one) => one.draw()); };
  return cards.length > 0 && h('details', { class: 'still', ontoggle: open }, h('summary', {}, `${plural(cards.length, 'curve')} that ${cards.length > 1 ? 'do' : 'does'} not move: ${cards.map((one) => `${one.dataset.chart} ${one.values}`).join(' · ')}`), h('div', { class: 'grid' }, cards));
}

/** How the run ended. */
function endingOf(one) {
  const { level, text, error, details, failed } = one.ending;
  const see = () => { leave(); Object.assign(state, { split: '', run: several ? one.name : '', from: String(failed.step), to: String(failed.step) }); show('samples'); };
  return h('div', { class: `ending ${level}`, role: level === 'bad' ? 'alert' : null },
    h('strong', {}, visible(text)),
    error && h('pre', { class: 'text' }, visible(error)),
    failed && h('p', {}, h('button', { class: 'link', 'data-failed': '', onclick: see }, `${plural(failed.count, 'sample')} of step ${failed.step}, as far as they came`), ' (in no metric)'),
    details && h('details', {}, h('summary', {}, 'the whole message'), h('pre', { class: 'text' }, visible(details))));
}

/** What a run was asked, how it ended, and its figures. */
function headline(one, place) {
  const jump = (key) => () => {
    const target = [...document.querySelectorAll('.card')].find((card) => card.keys.includes(key));
    if (target) {
      target.closest('details:not([open])')?.setAttribute('open', '');
      target.scrollIntoView({ block: 'center' });
      target.querySelector('.plot').focus({ preventScroll: true });
      return;
    }
    state.series = key;
    overview(document.querySelector('main'));
    document.querySelector('[data-field=series]').scrollIntoView({ behavior: 'smooth' });
  };
  return h('div', { class: 'lines' },
    several && h('h2', {}, h('span', { class: `key d${place % DASHES.length}`, color: palette(place) }), visible(one.name)),
    h('p', { class: 'note', 'data-asked': '' }, visible(one.asked)),
    endingOf(one),
    h('ul', {}, one.lines.map(({ level, text, key }) => h('li', { class: level },
      key ? h('button', { class: 'link', title: key, onclick: jump(key) }, visible(text)) : visible(text)))),
    one.steps.length > 2 && h('p', { class: 'note' }, 'a → b: mean of the first and of the last tenth of the steps; accuracies: first and last evaluation.'));
}

/** Answers to the same held-out prompts, as lists of rows: of the first and the last evaluation, or of the last one of each run. */
const compared = lazily(() => {
  const split = distinct('split').find((one) => String(one).startsWith('eval'));
  const whole = [...prompts().values()].map((rows) => sorted(rows.filter((row) => !cell(row, 'unfinished')), 'step', false));
  const heldOut = whole.filter(([first]) => !none(first) && cell(first, 'split') === split);
  if (!several) return heldOut.map((rows) => [rows[0], rows.at(-1)]).filter(([first, last]) => cell(last, 'step') > cell(first, 'step'));
  const last = runs.map((one) => new Map(heldOut.filter(([row]) => cell(row, 'run') === one.name).map((rows) => [cell(rows[0], 'prompt'), rows.at(-1)]))); // of each run, by prompt
  return [...last[0].keys()].filter((prompt) => last.every((answers) => answers.has(prompt))).map((prompt) => last.map((answers) => answers.get(prompt)));
});
/** How the answers were judged. Example: "wrong → right". */
const judged = (rows) => rows.map((row) => ({ true: 'right', false: 'wrong' })[cell(row, 'correct')] ?? 'not judged').join(several ? ' · ' : ' → ');
/** The answers by how they were judged, [[judgement, lists of rows], ...]: those that differ first, then the most frequent. */
function byJudgement() {
  const kinds = Map.groupBy(compared(), judged);
  const isMixed = (kind) => new Set(kind.split(several ? ' · ' : ' → ')).size > 1;
  return [...kinds].sort(([a, one], [b, other]) => isMixed(b) - isMixed(a) || other.length - one.length);
}
/** One held-out prompt with its answers side by side. */
function example() {
  const kinds = byJudgement();
  if (!kinds.length) return null;
  const body = h('div', {});
  const chips = kinds.map(([kind, lists]) => h('button', { class: 'chip', title: 'again: the next prompt', onclick: () => choose(kind, lists) }, `${kind} `, h('b', {}, lists.length.toLocaleString('en'))));
  let place = -1;
  let chosen;
  const choose = (kind, lists) => {
    place = kind === chosen ? (place + 1) % lists.length : 0;
    chosen = kind;
    chips.forEach((chip, i) => chip.setAttribute('aria-pressed', String(kinds[i][0] === kind)));
    replace(body, h('pre', { class: 'text asked' }, visible(question(lists[place][0])).trim()),
      h('div', { class: 'siblings' }, lists[place].map((row) => h('div', { class: 'sibling' },
        h('div', { class: 'facts' }, sampleLink(row, visible([cell(row, 'run'), `step ${cell(row, 'step')}`].filter(Boolean).join(', '))), verdictSign(cell(row, 'correct')), h('span', {}, 'reward ', h('b', {}, figure(cell(row, 'reward'))))),
        h('pre', { class: 'text clamp' }, visible(lastSaid(row)) || h('em', {}, 'empty')), answerLine(row)))));
  };
  choose(...kinds[0]);
  return h('section', { class: 'example' }, h('div', { class: 'paints' }, h('h2', {}, several ? 'The same held-out prompt in each run' : 'One held-out prompt, before and after'), chips), body);
}

function searchSeries(container, status) {
  const wanted = state.series.trim().toLowerCase();
  const hits = wanted ? allKeys().filter((key) => key.toLowerCase().includes(wanted)) : [];
  status.textContent = wanted ? `${hits.length} of ${allKeys().length} series${hits.length > MORE ? `; the first ${MORE} are shown` : ''}` : `${allKeys().length} series`;
  const cards = hits.slice(0, MORE).map((key) => curveCard({ title: key, keys: [[key, '']] })).filter(Boolean);
  container.replaceChildren(...cards);
  cards.forEach((one) => one.draw());
}
