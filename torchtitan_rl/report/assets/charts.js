// Curves: uPlot charts in cards, which share one crosshair.

const PALETTE = {
  light: ['#2a6fdb', '#d9611c', '#12866b', '#a63fb0', '#a87808', '#d1345b', '#5b6b7b', '#4b8b0f'],
  dark: ['#6aa5ff', '#ff9a5c', '#3fc9a3', '#d68be0', '#e0b84d', '#ff7d9c', '#a3b3c2', '#9ad45f'],
};
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const isDark = () => document.documentElement.dataset.theme === 'dark';
const palette = (place) => { const colors = PALETTE[isDark() ? 'dark' : 'light']; return colors[place % colors.length]; };
const faint = (color, share) => color + Math.round(255 * share).toString(16).padStart(2, '0');
const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const living = new Set();
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (target.plot && contentRect.width > 40) target.plot.setSize({ width: Math.floor(contentRect.width), height: target.plot.height });
  }
});
function clearCharts() {
  for (const plot of living) { sizes.unobserve(plot.root.parentNode); plot.destroy(); }
  living.clear();
}

/** Exponential moving average of the non-null values, with bias correction. Measurements of an evaluation stay as they are. */
function smoothed(values, key) {
  const share = isMeasured(key) ? 0 : state.smooth;
  if (!share) return values;
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

const isMeasured = (key) => key.startsWith('evaluation/');

/**
 * A card with the curves of some metrics, or null if the run has none of them. A definition has: title; keys
 * ([metric, label] pairs); band ([low, high] metrics around the first); percent; log; points.
 */
function curveCard(definition) {
  if (!definition.keys.some(([key]) => run.series[key])) return null;
  const log = state.log || definition.log;
  const lift = (values) => (log ? values.map((value) => (value !== null && value > 0 ? value : null)) : values);
  const columns = [run.steps];
  const series = [{}];
  const bands = [];
  const legend = [];
  const add = (values, one) => { columns.push(lift(values)); return series.push({ spanGaps: true, points: { show: false }, ...one }) - 1; };
  definition.keys.forEach(([key, label], order) => {
    const raw = run.series[key];
    if (!raw) return;
    const color = palette(order);
    const dashed = order % DASHES.length; // so that equal curves are both seen
    const dash = DASHES[dashed];
    const edges = order === 0 && edgesOf(definition, key);
    if (edges) {
      const [low, high] = edges.map((values) => add(smoothed(values, key), { stroke: 'transparent', width: 0 }));
      bands.push({ series: [high, low], fill: faint(color, 0.15) });
    }
    if (state.smooth && !isMeasured(key)) add(raw, { stroke: faint(color, 0.3), width: 1, dash });
    const few = raw.filter((value) => value !== null).length < 30;
    add(smoothed(raw, key), { stroke: color, width: 1.8, dash, points: { show: few && (definition.points || run.steps.length < 3), size: 5, fill: color } });
    legend.push({ values: raw, color, style: ` d${dashed}`, label });
  });
  if (columns.slice(1).every((values) => values.every((value) => value === null))) return null;
  const smooth = state.smooth > 0 && definition.keys.some(([key]) => !isMeasured(key)) && 'curves smoothed, numbers as measured';
  return card({ ...definition, note: [definition.note, smooth].filter(Boolean).join('; ') }, columns, series, bands, legend, { log, format: definition.percent ? percent : figure, names: definition.keys.map(([key]) => key) });
}

/** The band around a definition's first metric: [low values, high values], or a falsy value. */
function edgesOf(definition, key) {
  const std = definition.deviation && run.series[definition.deviation];
  if (std) return [-1, 1].map((sign) => run.series[key].map((value, i) => (value === null || std[i] === null ? null : value + sign * std[i])));
  const band = definition.band && definition.band.map((name) => run.series[name]);
  return band && band.every(Boolean) ? band : null;
}

/** A card with the seconds of a step's phases, stacked; null if the run has none. */
function stackedCard() {
  const keys = Object.keys(run.series).filter((key) => /^time\/[^/]+$/.test(key) && key !== 'time/step');
  const weight = (key) => run.series[key].reduce((sum, value) => sum + (value || 0), 0);
  keys.sort((a, b) => (a === 'time/unaccounted') - (b === 'time/unaccounted') || weight(b) - weight(a));
  // A phase is the slowest rank's: the phases of a step may sum to more than the step. Step 0 has no time of its own.
  const whole = run.series['time/step'] || [];
  const timed = run.steps.map((_, i) => i).filter((i) => whole[i]);
  if (!keys.length || !timed.length) return null;
  const steps = timed.map((i) => run.steps[i]);
  const scale = timed.map((i) => Math.min(1, whole[i] / (keys.reduce((sum, key) => sum + (run.series[key][i] || 0), 0) || 1)));
  const columns = [steps];
  const series = [{}];
  const legend = [];
  const total = steps.map(() => 0);
  keys.forEach((key, order) => {
    const color = key === 'time/unaccounted' ? palette(6) : palette(order < 6 ? order : order + 1);
    const values = timed.map((i, at) => (run.series[key][i] || 0) * scale[at]);
    smoothed(values, key).forEach((value, i) => { total[i] += value; });
    columns.push([...total]);
    series.push({ stroke: color, width: 0.5, points: { show: false } });
    legend.push({ color, label: key.slice(5), values });
  });
  // The highest sum is drawn first, then the lower sums on top of it.
  const order = keys.map((_, i) => keys.length - i);
  const note = `seconds by phase, stacked${state.smooth ? '; curves smoothed, numbers as measured' : ''}`;
  return card({ title: 'Time of a step', note }, [steps, ...order.map((i) => columns[i])], [{}, ...order.map((i) => ({ ...series[i], fill: series[i].stroke, stroke: cssColor('--paper') }))], [], legend, { format: (value) => `${figure(value)} s`, names: keys, zero: true });
}

/** A chart in words, for a screen reader: for each curve its first, last, lowest and highest value. */
function spokenChart(definition, columns, legend, format) {
  const curves = legend.slice(0, 6).map((one) => {
    const values = one.values.map((value, i) => [columns[0][i], value]).filter(([, value]) => value !== null && value !== undefined);
    if (!values.length) return '';
    const only = values.map(([, value]) => value);
    return `${one.label} from ${format(only[0])} at step ${values[0][0]} to ${format(only.at(-1))} at step ${values.at(-1)[0]}, between ${format(only.reduce((a, b) => Math.min(a, b)))} and ${format(only.reduce((a, b) => Math.max(a, b)))}`;
  }).filter(Boolean);
  return `Chart ${definition.title}. ${curves.join('. ')}. Arrow keys move through the steps.`;
}

/** A chart with its title and a legend, which shows the values under the crosshair, or else the last values, each with its own step. */
function card(definition, columns, series, bands, legend, { log, format, names, zero }) {
  const body = h('div', { class: 'plot', role: 'img', tabindex: 0, 'aria-label': spokenChart(definition, columns, legend, format), onkeydown: (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !body.plot) return;
    event.preventDefault();
    const now = body.plot.cursor.idx ?? (by > 0 ? -1 : columns[0].length);
    const next = Math.min(columns[0].length - 1, Math.max(0, now + by));
    body.plot.setCursor({ left: body.plot.valToPos(columns[0][next], 'x'), top: 10 });
    said.textContent = [where.textContent, ...legend.map((one, i) => `${one.label} ${values[i].textContent}`)].join(', ');
  } });
  const said = h('span', { class: 'unseen', role: 'status' });
  const where = h('span', { class: 'where' });
  const values = legend.map((one) => h('b', {}));
  // Room for the widest value, so that nothing moves under the pointer.
  const last = columns[0].at(-1);
  where.style.minWidth = `${`step ${last}`.length}ch`;
  legend.forEach((one, i) => { values[i].style.minWidth = `${widest(one.values, format) + (one.values.includes(null) ? `, step ${last}`.length : 0)}ch`; });
  const element = h('figure', { class: definition.dull ? 'card dull' : 'card', 'data-chart': definition.title },
    h('figcaption', {}, h('strong', { title: names.join('\n') }, definition.title), definition.note && h('span', { class: 'hint' }, definition.note)), body, said,
    legend.length > 0 && h('div', { class: 'legend' }, where, legend.map((one, i) => h('span', { class: 'keys' }, one.label && h('i', {}, one.label), h('span', { class: `key${one.style || ''}`, color: one.color }, values[i])))));
  const show = (index) => {
    const here = index ?? columns[0].length - 1;
    where.textContent = `step ${columns[0][here]}`;
    legend.forEach((one, i) => {
      let at = here;
      while (at > 0 && one.values[at] === null) at--;
      values[i].textContent = one.values[at] === null || at === here ? format(one.values[at]) : `${format(one.values[at])}, step ${columns[0][at]}`;
    });
  };
  const line = cssColor('--line');
  const axis = { stroke: cssColor('--soft'), grid: { stroke: line, width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
  const round = (value, ...leading) => leading.some((digit) => Math.abs(Math.log10(value / digit) - Math.round(Math.log10(value / digit))) < 1e-9);
  const tens = (u, splits) => splits.map((value) => (!log || (Math.log10(u.scales.y.max / u.scales.y.min) > 1.5 ? round(value, 1) : round(value, 1, 2, 5)) ? value : null));
  const options = {
    width: 400, height: definition.height || 190, series, bands, padding: [10, 20, 0, 0], legend: { show: false },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (u, low, high) => spread(low, high, zero, definition.percent) } },
    axes: [{ ...axis, size: 26, gap: 4, incrs: WHOLE }, { ...axis, size: 52, gap: 4, filter: tens, grid: { ...axis.grid, filter: tens }, values: (u, splits) => splits.map((v) => (v === null ? '' : definition.percent ? `${Number((100 * v).toPrecision(4))} %` : tick(v))) }],
    cursor: { sync: { key: 'steps' }, points: { size: 7 }, focus: { prox: 24 }, y: false },
    hooks: { setCursor: [(u) => show(u.cursor.idx ?? null)] },
  };
  show(null);
  element.draw = () => {
    options.width = Math.max(200, Math.floor(body.clientWidth));
    body.plot = new uPlot(options, columns, body);
    living.add(body.plot);
    sizes.observe(body);
  };
  return element;
}

const WHOLE = Array.from({ length: 9 }, (_, i) => [1, 2, 5].map((digit) => digit * 10 ** i)).flat(); // distances of ticks: steps are whole
const MEASURED = 400; // values of a curve, evenly spread
/** The number of characters of a curve's longest value; a percent sign is as wide as two digits. */
function widest(values, format) {
  const every = Math.ceil(values.length / MEASURED);
  return values.reduce((most, value, i) => { if (i % every) return most; const text = format(value ?? null); return Math.max(most, text.length + text.endsWith('%')); }, 1);
}
const tick = (value) => (value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? figure(value) : Number(value.toPrecision(5)).toLocaleString('en', { maximumFractionDigits: 6 }));
function spread(low, high, zero, share) {
  if (low === null || low === undefined) return [0, 1];
  if (zero) return [0, high * 1.05 || 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || (share ? 0.05 : 0.5);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** A scatter plot. */
function pointsCard(title, points, labels, colorOf, height = 260) {
  const kinds = [...new Set(points.map(colorOf))];
  const columns = [points.map((point) => point[0]), ...kinds.map((kind) => points.map((point) => (colorOf(point) === kind ? point[1] : null)))];
  const series = [{}, ...kinds.map((kind) => ({ paths: () => null, stroke: kind, points: { show: true, size: 5, width: 0, fill: faint(kind, 0.5) } }))];
  const element = card({ title, note: labels, height }, columns, series, [], [], { format: figure, names: [] });
  element.classList.add('wide');
  return element;
}

/** Adds cards to a container. Each card is drawn when it scrolls into view. */
const sight = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) { sight.unobserve(target); target.draw?.(); }
  }
}, { rootMargin: '300px' });
function placeCards(container, made) {
  const shown = made.flat().filter(Boolean);
  container.replaceChildren(...shown);
  for (const one of shown) sight.observe(one);
  return shown.length;
}
