const $ = (id) => element.querySelector("#tc-" + id);
const root = element.querySelector("#tc"), canvas = $("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
const state = { model: null, about: null, tab: "draw", source: null, capsule: null, pair: [], picked: null, uploaded: null };
let example = null, strokes = 0, busy = false, again = false, answer = null, way = null, wayKey = "", timer = 0;

const WAYS = { turn: ["turn", "°"], right: ["shift right", " px"], down: ["shift down", " px"] };
const tell = (id, text) => { $(id).textContent = text; $(id).hidden = !text; };
const say = (text) => tell("toast", text && text[0].toUpperCase() + text.slice(1).replace(/([^.?!])$/, "$1."));
const all = (query) => Array.from(element.querySelectorAll(query));
const moves = () => ({ turn: +$("turn").value, right: +$("right").value, down: +$("down").value });
const bend = () => all("#tc-sliders input").map((slider) => +slider.value);
const nameOf = (k) => state.about.classes[k];

async function call(name, request) {
  try {
    const late = new Promise((_, refuse) => setTimeout(refuse, 10000));
    const got = await Promise.race([server[name](request), late]);
    if (got) return got;
  } catch (error) { /* said below */ }
  return { error: "the page gets no answer; is torchcaps demo still running?" };
}

async function open(name) {
  const about = await call("about", { model: name });
  if (about.error) return say(about.error);
  const before = state.about;
  state.about = about;
  state.model = about.name;
  state.capsule = null;
  $("model").replaceChildren(...about.names.map((each) => new Option(each, each, false, each === about.name)));
  $("lead").textContent = (about.digits ? "Draw a digit" : "Choose a picture") + ", see which capsules read it, and bend them.";
  makeBars();
  makeThumbs();
  makeSliders();
  const mnist = (each) => each.digits && each.data.includes("mnist");
  const same = before && before.labels.join() === about.labels.join() && (before.data === about.data || (mnist(before) && mnist(about)));
  if (!same) {
    state.pair = [];
    state.picked = null;
    if (!strokes) showExample();
  }
  root.dataset.model = about.name;
  const undrawn = state.tab === "draw" && !strokes && example === null && about.labels.length;
  turnTo(about.objects > 1 ? "overlay" : undrawn ? "sample" : state.tab);
}

/* A request is under way at most once; what changed meanwhile is asked for when it is back. */
async function ask() {
  if (!state.source) return blank();
  if (busy) { again = true; return; }
  busy = true;
  root.dataset.busy = "yes";
  do {
    again = false;
    const asked = state.source;
    const request = { model: state.model, source: asked, capsule: state.capsule, bend: bend(), ...moves() };
    const start = performance.now();
    const got = await call("read", request);
    if (!state.source) { blank(); continue; }
    if (got.error) { blank(); say(got.error); } else { say(""); show(got, performance.now() - start); }
  } while (again);
  busy = false;
  root.dataset.busy = "no";
  later();
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(askPath, 150);
}

function pathKey() {
  return JSON.stringify([state.model, state.source, answer.capsule]);
}

async function askPath() {
  if (!answer || !answer.pose || !state.source) return;
  const key = pathKey();
  if (key === wayKey) return;
  wayKey = key;
  const got = await call("path", { model: state.model, source: state.source, capsule: answer.capsule });
  if (got.error || key !== wayKey) return;
  way = { key, ...got };
  drawPath();
}

function show(got, milliseconds) {
  if (answer && answer.capsule !== got.capsule) { way = null; wayKey = ""; }
  answer = got;
  root.dataset.milliseconds = Math.round(milliseconds);
  const found = got.found.map(nameOf), words = got.none ? "none of these" : found.join(" + ");
  const lengths = (found.length > 1 ? "lengths " : "length ") + got.found.map((k) => got.lengths[k].toFixed(2)).join(", ");
  $("found").textContent = $("chip").textContent = words;
  $("found").classList.toggle("tc-long", words.length > 6);
  $("found").classList.toggle("tc-none", got.none);
  $("found-text").textContent = got.none ? "nearest is " + found.join(" + ") + ", " + lengths : lengths;
  fillBars();
  put("seen", got.input);
  put("drawn", got.reconstruction, state.about.decoder ? "" : "no trained decoder");
  put("coupling", got.coupling, "none kept");
  put("bent", got.bent, state.about.decoder ? "" : "no trained decoder");
  $("drawn-text").replaceChildren(...(got.found.length === 2
    ? [tinted(found[0], "first"), " and ", tinted(found[1], "second"), ", redrawn"] : ["reconstruction"]));
  $("coupling-text").textContent = "where the votes for " + nameOf(got.capsule) + " come from";
  $("bend-name").textContent = nameOf(got.capsule);
  $("bent-text").textContent = bend().some((value) => value) ? "bent" : "as it is";
  drawPath();
}

function tinted(text, name) {
  const span = document.createElement("span");
  span.className = "tc-" + name;
  span.textContent = text;
  return span;
}

function blank() {
  answer = way = null;
  wayKey = "";
  $("found").textContent = "–";
  $("found").classList.remove("tc-long", "tc-none");
  $("found-text").textContent = "nothing yet";
  for (const id of ["seen", "drawn", "coupling", "bent"]) put(id, null);
  const captions = { drawn: "reconstruction", coupling: "coupling", bent: "as it is" };
  for (const id in captions) $(id + "-text").textContent = captions[id];
  $("bend-name").textContent = $("chip").textContent = "";
  fillBars();
  drawPath();
}

function put(id, picture, why) {
  const image = $(id);
  image.hidden = !picture;
  if (picture) image.src = picture; else image.removeAttribute("src");
  image.parentNode.dataset.why = picture ? "" : why || "";
}

function makeBars() {
  const rows = Math.min(state.about.classes.length, 12);
  const longest = Math.max(...state.about.classes.map((name) => name.length));
  $("bars").style.setProperty("--label", Math.min(110, Math.max(18, 8.5 * longest)) + "px");
  $("bars").replaceChildren(...Array.from({ length: rows }, (_, k) => {
    const row = document.createElement("button");
    row.className = "tc-bar";
    row.innerHTML = "<span></span><i><b></b></i><output></output>";
    row.addEventListener("click", () => {
      const k = +row.dataset.k;
      state.capsule = state.capsule === k ? null : k;
      straighten();
      ask();
    });
    row.dataset.k = k;
    return row;
  }));
  fillBars();
}

function fillBars() {
  const rows = all(".tc-bar"), classes = state.about ? state.about.classes : [];
  const lengths = answer ? answer.lengths : classes.map(() => 0);
  let order = classes.map((_, k) => k);
  if (order.length > rows.length) order.sort((a, b) => lengths[b] - lengths[a]);
  rows.forEach((row, n) => {
    const k = order[n];
    row.dataset.k = k;
    row.children[0].textContent = classes[k];
    row.querySelector("b").style.width = (100 * Math.min(1, lengths[k])).toFixed(1) + "%";
    row.children[2].textContent = answer ? lengths[k].toFixed(2) : "";
    row.classList.toggle("tc-is-found", !!answer && !answer.none && answer.found.includes(k));
    row.classList.toggle("tc-is-second", !!answer && !answer.none && answer.found[1] === k);
    row.setAttribute("aria-pressed", String(!!answer && answer.capsule === k));
  });
}

function makeSliders() {
  const shown = state.about.decoder ? state.about.dim : 0;
  $("sliders").replaceChildren(...Array.from({ length: shown }, (_, k) => {
    const label = document.createElement("label");
    label.innerHTML = '<span></span><input type="range" min="-1" max="1" step="0.02" value="0">';
    label.children[0].textContent = k + 1;
    label.children[1].setAttribute("aria-label", "dimension " + (k + 1));
    label.children[1].addEventListener("input", ask);
    label.children[1].addEventListener("dblclick", () => { label.children[1].value = 0; ask(); });
    return label;
  }));
  if (!shown) $("sliders").textContent = state.about.dim ? "Without a trained decoder nothing can be redrawn." : "There is no capsule to bend.";
  $("straight").disabled = !shown;
}

function straighten() {
  for (const slider of all("#tc-sliders input")) slider.value = 0;
}

/* Drawing */
function where(event) {
  const box = canvas.getBoundingClientRect();
  return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height];
}

function clear() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  example = null;
  strokes = 0;
}

const drawing = () => ({ kind: "drawing", picture: canvas.toDataURL("image/png") });
const sample = (index) => ({ kind: "sample", index });

function send() {
  state.source = drawing();
  ask();
}

let last = null, soon = 0;
canvas.addEventListener("pointerdown", (event) => {
  if (example !== null || !strokes) { clear(); straighten(); }
  strokes += 1;
  $("hint").hidden = true;
  canvas.setPointerCapture(event.pointerId);
  last = where(event);
  stroke(last);
  event.preventDefault();
});
canvas.addEventListener("pointermove", (event) => {
  if (!last) return;
  for (const each of event.getCoalescedEvents ? [...event.getCoalescedEvents(), event] : [event]) stroke(where(each));
  if (!soon) soon = setTimeout(() => { soon = 0; if (last) send(); }, 80);
});
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { if (last) { last = null; send(); } });

function stroke(to) {
  pen.strokeStyle = "#fff";
  pen.lineWidth = +$("pen").value;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(last[0], last[1]);
  pen.lineTo(to[0], to[1]);
  pen.stroke();
  last = to;
}

$("clear").addEventListener("click", () => {
  clear();
  straighten();
  $("hint").hidden = false;
  send();
});

function showExample() {
  clear();
  const count = state.about.labels.length;
  if (!count || !state.about.digits) { $("hint").hidden = false; return; }
  const sprite = new Image(), index = oneOf(7);
  sprite.onload = () => {
    if (example !== index) return;
    const side = sprite.naturalHeight / count;
    pen.drawImage(sprite, 0, index * side, sprite.naturalWidth, side, 0, 0, canvas.width, canvas.height);
  };
  sprite.src = state.about.samples;
  $("hint").hidden = true;
  example = index;
}

/* Choosing */
const oneOf = (label) => Math.max(0, state.about.labels.indexOf(label));

function makeThumbs() {
  const { labels, samples, classes } = state.about, each = labels.filter((label) => label === labels[0]).length;
  $("thumbs").style.setProperty("--columns", Math.min(10, Math.max(5, classes.length)));
  const order = labels.map((_, n) => n).sort((a, b) => a % each - b % each || a - b);
  $("thumbs").replaceChildren(...order.map((index) => {
    const button = document.createElement("button");
    button.dataset.index = index;
    button.setAttribute("aria-label", "test image of " + classes[labels[index]]);
    button.title = classes[labels[index]];
    button.style.backgroundImage = "url(" + samples + ")";
    button.style.backgroundSize = "100% " + 100 * labels.length + "%";
    button.style.backgroundPosition = "0 " + 100 * index / Math.max(1, labels.length - 1) + "%";
    button.addEventListener("click", () => pick(index));
    return button;
  }));
  markThumbs();
}

function pick(index) {
  straighten();
  if (state.tab === "overlay") {
    state.pair = state.pair.length === 2 ? [index] : [...state.pair, index];
  } else {
    state.picked = index;
  }
  state.source = shown();
  markThumbs();
  ask();
}

function overlay() {
  return { kind: "overlay", first: state.pair[0], second: state.pair[1], apart: +$("apart").value };
}

/* What the open tab has to read. */
function shown() {
  if (state.tab === "draw") return strokes ? drawing() : example === null ? null : sample(example);
  if (state.tab === "upload") return state.uploaded;
  if (state.tab === "overlay") return state.pair.length === 2 ? overlay() : state.pair.length ? sample(state.pair[0]) : null;
  return state.picked === null ? null : sample(state.picked);
}

function markThumbs() {
  const pair = state.tab === "overlay" ? state.pair : [state.picked];
  for (const button of all("#tc-thumbs button")) {
    const at = pair.indexOf(+button.dataset.index);
    button.className = at < 0 ? "" : at ? "tc-second" : "tc-first";
  }
  $("choose-text").textContent = !state.about.labels.length ? "The test set is not on this computer."
    : state.tab !== "overlay" ? "Images that the network has never been trained on."
    : state.pair.length === 1 ? "And one more."
    : "Choose two, which are laid over each other." + (state.about.objects > 1 ? "" : state.about.pairs);
}

function turnTo(tab) {
  state.tab = tab;
  for (const button of all("[data-tab]")) button.setAttribute("aria-selected", String(button.dataset.tab === tab));
  const panel = tab === "sample" || tab === "overlay" ? "choose" : tab;
  for (const each of all("[data-panel]")) each.hidden = each.dataset.panel !== panel;
  $("apart-row").hidden = tab !== "overlay";
  if (!state.about) return;
  if (state.about.labels.length && state.picked === null) state.picked = oneOf(7);
  if (state.about.labels.length > 1 && !state.pair.length) state.pair = [oneOf(2), oneOf(4)];
  say("");
  tell("note", [state.about.note, state.about.objects > 1 && tab !== "overlay" ? state.about.alone : ""].join(" ").trim());
  markThumbs();
  state.source = shown();
  ask();
}
for (const button of all("[data-tab]")) button.addEventListener("click", () => turnTo(button.dataset.tab));
$("apart").addEventListener("input", () => {
  $("apart-out").textContent = $("apart").value + " px";
  if (state.pair.length === 2) { state.source = overlay(); ask(); }
});

/* Uploading */
function take(file) {
  if (!file) return;
  if (file.size > 10e6) { state.source = state.uploaded = null; blank(); return say("this file is larger than 10 MB; make the picture smaller"); }
  const reader = new FileReader();
  reader.onload = () => { straighten(); state.source = state.uploaded = { kind: "upload", picture: reader.result }; ask(); };
  reader.onerror = () => say("this file cannot be read");
  reader.readAsDataURL(file);
}
$("file").addEventListener("change", () => { take($("file").files[0]); $("file").value = ""; });
for (const name of ["dragover", "drop"]) $("drop").addEventListener(name, (event) => {
  event.preventDefault();
  if (name === "drop") take(event.dataTransfer.files[0]);
});

/* Turning, shifting, bending */
function units() {
  for (const id of ["turn", "right", "down"]) $(id).nextElementSibling.textContent = $(id).value + WAYS[id][1];
}
for (const id of ["turn", "right", "down"]) $(id).addEventListener("input", () => { units(); ask(); });
$("still").addEventListener("click", () => { for (const id of ["turn", "right", "down"]) $(id).value = 0; units(); ask(); });
$("straight").addEventListener("click", () => { straighten(); ask(); });
$("model").addEventListener("change", () => open($("model").value));

/* The pose's way */
function svg(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text) node.textContent = text;
  return node;
}

/* Each end's word as near to it as there is room: within the plot, on no other word, and on no other end if that can be. */
function label(ends, stops) {
  const boxes = [], parts = [];
  for (const end of ends) {
    const half = 3.2 * end.text.length + 2;
    let best = null;
    for (let far = 0; far < 12; far++) for (let turn = 0; turn < 16; turn++) {
      const angle = -Math.PI / 2 + turn * Math.PI / 8;
      const x = end.x + (half * Math.abs(Math.cos(angle)) ** 0.5 + 5 + 9 * far) * Math.cos(angle), y = end.y + (12 + 9 * far) * Math.sin(angle);
      if (x < 6 + half || x > 356 - half || y < 8 || y > 190) continue;
      if (boxes.some((box) => Math.abs(box.x - x) < box.half + half && Math.abs(box.y - y) < 13)) continue;
      const under = (stop) => Math.abs(stop[0] - x) < half + 3 && Math.abs(stop[1] - y) < 9;
      const cost = 3 * far + 4 * ends.filter((other) => under([other.x, other.y])).length + stops.filter(under).length + (turn % 4 ? 0.5 : 0);
      if (!best || cost < best.cost) best = { x, y, half, far, cost };
    }
    if (!best) continue;
    boxes.push(best);
    if (best.far) parts.push(svg("path", { d: "M" + end.x + " " + end.y + "L" + best.x + " " + best.y, class: "tc-lead tc-way-" + end.name }));
    parts.push(svg("text", { x: best.x, y: best.y + 3.6, "text-anchor": "middle", class: "tc-word tc-way-" + end.name }, end.text));
  }
  return parts;
}

function drawPath() {
  const plot = $("path"), parts = [], ends = [];
  plot.replaceChildren();
  if (!way || !answer || !answer.pose) return;
  const stale = way.key !== pathKey(); // of the picture before, until that of this one is there
  plot.classList.toggle("tc-stale", stale);
  const project = (pose) => [0, 1].map((n) => pose.reduce((sum, x, k) => sum + (x - way.mean[k]) * way.axes[k][n], 0));
  const now = project(answer.pose);
  const points = way.ways.flatMap((each) => each.points);
  const within = (x) => Math.max(0, Math.min(1, x));
  const [x, y] = [0, 1].map((n) => {
    const [low, high] = [Math.min, Math.max].map((most) => most(...points.map((p) => p[n])));
    return (p) => within((p[n] - low) / Math.max(1e-6, high - low));
  });
  const at = (p) => [(34 + 292 * x(p)).toFixed(1), (182 - 164 * y(p)).toFixed(1)];
  parts.push(svg("path", { d: "M4 196V4M4 196H356", class: "tc-axes" }));
  for (const each of way.ways) {
    const line = each.points.map((p) => at(p).join(",")).join(" ");
    parts.push(svg("polyline", { points: line, class: "tc-way tc-way-" + each.name }));
    for (const [n, p] of each.points.entries()) {
      const [cx, cy] = at(p), end = n === 0 || n === each.points.length - 1;
      parts.push(svg("circle", { cx, cy, r: end ? 3.4 : 1.6, class: "tc-stop tc-way-" + each.name }));
      if (end) ends.push({ name: each.name, x: +cx, y: +cy, text: (each.steps[n] > 0 ? "+" : "−") + Math.abs(each.steps[n]) + WAYS[each.name][1] });
    }
  }
  parts.push(...label(ends, points.map(at)));
  const [cx, cy] = at(now);
  if (!stale) parts.push(svg("circle", { cx, cy, r: 6.5, class: "tc-now", id: "tc-now" }));
  const share = way.shares.map((x) => Math.round(100 * x) + " %");
  Object.keys(WAYS).forEach((name, n) => parts.push(svg("text", { x: 4 + [0, 42, 114][n], y: 216, class: "tc-key tc-way-" + name }, "● " + WAYS[name][0])));
  parts.push(svg("text", { x: 354, y: 216, "text-anchor": "end", class: "tc-key" }, "PC 1 " + share[0] + ", PC 2 " + share[1]));
  plot.append(...parts);
}

clear();
units();
turnTo("draw");
open(null);
