// Curves: uPlot charts in cards, which share one crosshair.

const PALETTE = {
  light: ['#2a6fdb', '#d9611c', '#12866b', '#a63fb0', '#a87808', '#d1345b', '#5b6b7b', '#4b8b0f'],
  dark: ['#6aa5ff', '#ff9a5c', '#3fc9a3', '#d68be0', '#e0b84d', '#ff7d9c', '#a3b3c2', '#9ad45f'],
};
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const DARK = matchMedia('(prefers-color-scheme: dark)');
const palette = (place) => { const colors = PALETTE[DARK.matches ? 'dark' : 'light']; return colors[place % colors.length]; };
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

/** The steps of all runs, and the values of a run's metric at them; null if the run has none. */
const STEPS = [...new Set(runs.flatMap((one) => one.steps))].sort((a, b) => a - b);
function valuesOf(one, key) {
  const at = one.series[key] && new Map(one.steps.map((step, i) => [step, one.series[key][i]]));
  return at ? STEPS.map((step) => at.get(step) ?? null) : null;
}
const extent = (values) => values.reduce(([low, high], value) => (value === null ? [low, high] : [Math.min(low, value), Math.max(high, value)]), [Infinity, -Infinity]);
/** Whether a curve stays within a hundredth of its size, or a millionth. */
function isStill(values) {
  const [low, high] = extent(values);
  return STEPS.length > 1 && high - low <= Math.max(1e-6, 0.01 * Math.max(Math.abs(low), Math.abs(high)));
}

/**
 * A card with the curves of some metrics, or null if no run has one of them. A definition has: title; keys
 * ([metric, label] pairs); band ([low, high] metrics around the first); percent; log; points.
 */
function curveCard(definition) {
  const { log } = definition;
  const lift = (values) => (log ? values.map((value) => (value !== null && value > 0 ? value : null)) : values);
  const columns = [STEPS];
  const series = [{}];
  const bands = [];
  const legend = [];
  const add = (values, one) => { columns.push(lift(values)); return series.push({ spanGaps: true, points: { show: false }, ...one }) - 1; };
  runs.forEach((one, place) => definition.keys.forEach(([key, label], order) => {
    const raw = valuesOf(one, key);
    if (!raw) return;
    const color = palette(place + order);
    const dashed = (place + order) % DASHES.length; // so that equal curves are both seen
    const dash = DASHES[dashed];
    if (order === 0 && definition.band?.every((name) => one.series[name])) {
      const [low, high] = definition.band.map((name) => add(valuesOf(one, name), { stroke: 'transparent', width: 0 }));
      bands.push({ series: [high, low], fill: faint(color, 0.15) });
    }
    const few = raw.filter((value) => value !== null).length < 30;
    add(raw, { stroke: color, width: 1.8, dash, points: { show: few && (definition.points || STEPS.length < 3), size: 5, fill: color } });
    legend.push({ values: raw, color, style: ` d${dashed}`, label: several ? one.name : label });
  }));
  if (columns.length === 1 || columns.slice(1).every((values) => values.every((value) => value === null))) return null;
  return card(definition, columns, series, bands, legend, { log, format: definition.percent ? percent : figure, names: definition.keys.map(([key]) => key) });
}

/** A chart with its title and a legend, which shows the values under the crosshair, or else the last values, each with its own step. */
function card(definition, columns, series, bands, legend, { log, format, names }) {
  const body = h('div', { class: 'plot', role: 'img', tabindex: 0, 'aria-label': `Chart ${definition.title}. Arrow keys move through the steps.`, onkeydown: (event) => {
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
  const element = h('figure', { class: 'card', 'data-chart': definition.title },
    h('figcaption', {}, h('strong', { title: names.join('\n') }, definition.title), definition.note && h('span', { class: 'hint' }, definition.note)), body, said,
    h('div', { class: 'legend' }, where, legend.map((one, i) => h('span', { class: 'keys' }, one.label && h('i', {}, one.label), h('span', { class: `key${one.style}`, color: one.color }, values[i])))));
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
  const options = {
    width: 400, height: 190, series, bands, padding: [10, 20, 0, 0], legend: { show: false },
    scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (u, low, high) => (low === null ? [low, high] : low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true)) } },
    axes: [{ ...axis, size: 26, gap: 4, incrs: WHOLE }, { ...axis, size: 52, gap: 4, values: (u, splits) => splits.map((v) => (v === null ? '' : definition.percent ? `${Number((100 * v).toPrecision(4))} %` : tick(v))) }],
    cursor: { sync: { key: 'steps' }, points: { size: 7 }, focus: { prox: 24 }, y: false },
    hooks: { setCursor: [(u) => show(u.cursor.idx ?? null)], draw: [drawResumes] },
  };
  show(null);
  element.isCurve = legend.some((one) => one.values.filter((value) => value !== null).length > 1);
  element.still = legend.every((one) => isStill(one.values));
  element.values = legend.map((one) => format(one.values.findLast((value) => value !== null))).join(', ');
  element.keys = names;
  element.draw = () => {
    if (body.plot) return;
    options.width = Math.max(200, Math.floor(body.clientWidth));
    body.plot = new uPlot(options, columns, body);
    living.add(body.plot);
    sizes.observe(body);
  };
  return element;
}

/** Marks the steps from which a run went on with another config, by a line with what changed. */
function drawResumes(u) {
  const { ctx, bbox } = u;
  const dots = devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * dots}px system-ui, sans-serif`;
  ctx.setLineDash([3 * dots, 3 * dots]);
  runs.forEach((one, place) => one.resumes.forEach(({ step, changed }, order) => {
    const x = Math.round(u.valToPos(step, 'x', true));
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    const isLeft = x < bbox.left + bbox.width / 2;
    ctx.strokeStyle = ctx.fillStyle = several ? palette(place) : cssColor('--warn');
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.textAlign = isLeft ? 'left' : 'right';
    const room = (isLeft ? bbox.left + bbox.width - x : x - bbox.left) - 4 * dots;
    ctx.fillText(changeWords(changed), x + (isLeft ? 4 : -4) * dots, bbox.top + (11 + 13 * (order + place)) * dots, room);
  }));
  ctx.restore();
}
/** What changed, in the words that fit a chart. Example: "lr 0.002 → 0.001, 1 more". */
function changeWords(changed) {
  const [[name, change], ...more] = Object.entries(changed);
  const setting = name.split(/[.:] ?/).at(-1);
  return `${setting} ${change.length > 24 ? 'changed' : change.replace('->', '→')}${more.length ? `, ${more.length} more` : ''}`;
}

const WHOLE = Array.from({ length: 9 }, (_, i) => [1, 2, 5].map((digit) => digit * 10 ** i)).flat(); // distances of ticks: steps are whole
const tick = (value) => (value && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? figure(value) : Number(value.toPrecision(5)).toLocaleString('en', { maximumFractionDigits: 6 }));
