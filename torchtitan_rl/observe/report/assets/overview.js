// The overview: how the run ended and its figures, then the most important curves, then a search over all series.

const FIRST = [
  { title: 'Reward', keys: [['reward/mean', 'mean']], note: 'mean of rollouts' },
  { title: 'Held-out accuracy', keys: [['evaluation/accuracy', 'greedy'], ['evaluation/sampled/accuracy', 'sampled']], band: ['evaluation/accuracy_low', 'evaluation/accuracy_high'], percent: true, points: true, note: 'band: 95 % interval' },
  { title: 'Held-out loss', keys: [['evaluation/loss', 'demonstrations']], points: true, note: 'nats per token' },
  { title: 'Divergence from the teacher', keys: [['teacher/divergence', 'exact'], ['evaluation/divergence', 'exact, held-out'], ['teacher/kl_k1', 'k1'], ['teacher/kl_k3', 'k3']], note: 'nats per token, on the policy’s own samples' },
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
/** A chart for each number that a reward function logs. */
const OWN = Object.keys(run.series).filter((key) => key.startsWith('extra/') && !key.endsWith('/non_finite')).sort().map((key) => ({ title: key.slice(6), keys: [[key, 'mean']], note: 'logged by a reward function' }));
const MORE = 24;

function overview(main) {
  const charts = h('div', { class: 'grid' });
  const found = h('div', { class: 'grid' });
  const status = h('p', { class: 'note' });
  const search = () => { remember(); searchSeries(found, status); };
  replace(main,
    headline(),
    h('div', { class: 'bar' }, h('h2', {}, 'Curves')),
    charts,
    h('div', { class: 'bar' }, h('h2', {}, 'All series'), input('', 'series', 'search', search, { placeholder: 'part of a name, such as kl_k3', 'aria-label': 'search series', list: 'series' }), h('datalist', { id: 'series' }, allKeys().map((key) => h('option', { value: key })))),
    status, found);
  clearCharts();
  placeCards(charts, [...FIRST, ...OWN.slice(0, MORE)].map(curveCard));
  search();
}

/** How the run ended, as the first thing to read. */
function endingOf() {
  const { level, text, error, details, failed } = run.ending;
  const see = () => { leave(); Object.assign(state, { split: '', from: String(failed.step), to: String(failed.step) }); show('samples'); };
  return h('div', { class: `ending ${level}`, role: level === 'bad' ? 'alert' : null },
    h('strong', {}, visible(text)),
    error && h('pre', { class: 'text' }, visible(error)),
    failed && h('p', {}, h('button', { class: 'link', 'data-failed': '', onclick: see }, `${plural(failed.count, 'sample')} of step ${failed.step}, as far as they came`), ' (in no metric)'),
    details && h('details', {}, h('summary', {}, 'the whole message'), h('pre', { class: 'text' }, visible(details))));
}

function headline() {
  const jump = (line) => line.key && (() => {
    const hit = [...FIRST, ...OWN].find((one) => one.keys.some(([key]) => key === line.key));
    const target = hit && document.querySelector(`[data-chart="${hit.title}"]`);
    if (target) { target.scrollIntoView({ block: 'center' }); target.querySelector('.plot').focus({ preventScroll: true }); return; }
    state.series = line.key;
    overview(document.querySelector('main'));
    document.querySelector('[data-field=series]').scrollIntoView({ behavior: 'smooth' });
  });
  return h('section', { class: 'lines' },
    h('p', { class: 'note', 'data-about': '' }, visible(run.about.filter(Boolean).join(' · '))),
    endingOf(),
    h('ul', {}, run.lines.map((line) => h('li', { class: line.level },
      line.key ? h('button', { class: 'link', title: line.key, onclick: jump(line) }, line.text) : line.text))),
    run.steps.length > 2 && h('p', { class: 'note' }, 'a → b: the means of the first and of the last tenth of the steps; of accuracies the first and the last evaluation.'));
}

const allKeys = lazily(() => Object.keys(run.series).sort());

function searchSeries(container, status) {
  const wanted = state.series.trim().toLowerCase();
  const hits = wanted ? allKeys().filter((key) => key.toLowerCase().includes(wanted)) : [];
  status.textContent = wanted ? `${hits.length} of ${allKeys().length} series${hits.length > MORE ? `; the first ${MORE} are shown` : ''}` : `${allKeys().length} series`;
  placeCards(container, hits.slice(0, MORE).map((key) => curveCard({ title: key, keys: [[key, '']] })));
}
