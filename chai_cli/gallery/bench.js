"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const CELL = 4; // pixels of a request in the map, at least
  const AIRY = 150; // requests up to which their cells stand apart
  const LOG = 3; // dearest over cheapest row from which seconds are drawn by their ratio
  const CROWD = 10; // intervals from which they stand back behind their points
  const NEAR = 12; // pixels around a mark that are its own
  const OUTCOMES = {r: ["right", "right"], g: ["gained", "right, where dense is wrong"], w: ["wrong", "wrong, as dense is"], l: ["lost", "lost"]};

  const at = (id) => document.getElementById(id);
  const data = JSON.parse(at("data").textContent);
  const rows = data.rows;
  const byLabel = new Map(rows.map((row) => [row.label, row]));

  const el = (tag, name = "", text = "") => {
    const one = document.createElement(tag);
    if (name) one.className = name;
    if (text) one.textContent = text;
    return one;
  };
  const draw = (tag, name, values = {}, text = "") => {
    const one = document.createElementNS(SVG, tag);
    if (name) one.setAttribute("class", name);
    for (const [key, value] of Object.entries(values)) one.setAttribute(key, value);
    if (text) one.textContent = text;
    return one;
  };
  const own = (tag, name, text) => Object.assign(el(tag, name, text), {dir: "auto"});
  const fixed = (digits) => (value) => (value === null ? "–" : value.toFixed(digits));
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const cut = (text, length) => (text.length > length ? text.slice(0, length - 1).replace(/[\uD800-\uDBFF]$/, "") + "…" : text);
  const minus = (text) => text.replace("-", "−");
  const SCALE = data.judged ? 100 : 1;
  const score = (value) => (data.judged ? (100 * value).toFixed(1) : value.toFixed(4));
  const unit = data.judged ? " %" : "";
  const signed = (value) => {
    const text = score(Math.abs(value));
    return `${value < 0 && Number(text) ? "−" : "+"}${text}`;
  };
  const range = (found) => `[${signed(found[1])}, ${signed(found[2])}]`;
  const sure = (row, found) => row.shown.count >= data.few && found[1] !== null && found[2] !== null;
  const side = (row, found) => (!sure(row, found) ? "" : found[1] > 0 ? "gain" : found[2] < 0 ? "loss" : "");

  let kind = "all"; // rows that table and map show
  let listed = rows; // those, in their order

  // The table

  const of = (name) => (row) => row.shown?.[name] ?? null;
  const mean = (name) => (row) => row.shown?.[name]?.[0] ?? null;
  const gain = (name) => (cell, row) => {
    const found = row.shown[name];
    if (!found) return void (cell.textContent = "–");
    cell.append(signed(found[0]));
    if (sure(row, found)) cell.append(el("small", "", range(found)));
    const where = side(row, found);
    if (where) cell.classList.add(where);
  };
  const said = (name, by) => ({value: of(name), say: (row) => by(row.shown[name])});
  const percent = (digits) => (value) => (value === null ? "–" : `${(100 * value).toFixed(digits)} %`);
  const COLUMNS = [
    {name: "row", value: (row) => row.label},
    {name: "hit rate", value: (row) => row.rate, say: (row) => percent(0)(row.rate)},
    {name: "n", ...said("count", String)},
    {name: "calls", ...said("calls", fixed(0))},
    {name: "seconds", ...said("seconds", fixed(3))},
    {name: "× on hits", ...said("speedup", fixed(2))},
    {name: "× overall", value: (row) => row.all?.speedup ?? null, say: (row) => fixed(2)(row.all?.speedup ?? null)},
    {name: data.judged ? "score, %" : "score", ...said("fidelity", (value) => score(value))},
    {name: "to dense", value: mean("to_dense"), fill: gain("to_dense")},
    {name: "to control", value: mean("to_control"), fill: gain("to_control")},
    {name: "to frontier", value: mean("to_frontier"), fill: gain("to_frontier")},
    {name: "worth", value: of("worth"), say: (row) => (row.shown.worth === null ? "never" : row.shown.worth.toFixed(2))},
    {
      name: "unsafe", only: data.judged, value: of("unsafe"),
      fill: (cell, row) => {
        cell.append(row.shown.unsafe === null ? "–" : String(row.shown.unsafe));
        if (row.shown.unsafe !== null && row.shown.unsafe_bound !== null) cell.append(el("small", "", `< ${percent(1)(row.shown.unsafe_bound)}`));
      },
    },
    {
      name: "drift", only: data.judged, value: of("drift"),
      fill: (cell, row) => {
        cell.append(row.shown.drift === null ? "–" : String(row.shown.drift));
        if (row.shown.drift !== null && row.shown.with_donor) cell.append(el("small", "", `of ${row.shown.with_donor}`));
      },
    },
    {name: "CLIP-T", only: data.judged, ...said("clip_t", fixed(4))},
    {name: "PSNR, dB", ...said("psnr", fixed(1))},
    {name: "SSIM", ...said("ssim", fixed(3))},
    {name: "MiB", ...said("mib", fixed(0))},
    {name: "KiB an entry", value: (row) => row.kib, say: (row) => fixed(1)(row.kib)},
  ].filter((column) => column.only ?? true);

  const body = at("table").tBodies[0], head = at("table").tHead.rows[0];
  let sorted = null, falling = false;

  function name(row, note = "") {
    const cell = el("th", "label");
    const who = el("span", "who");
    cell.scope = "row";
    const words = own("span", "", "");
    for (const part of row.label.split(/(?<=[:,+])/)) words.append(part, el("wbr"));
    who.append(el("i", `swatch ${row.kind}`), words, ...(note ? [el("small", "", note)] : []));
    cell.append(who);
    return cell;
  }

  function line(row) {
    const one = el("tr", row.kind);
    one.tabIndex = -1;
    one.append(name(row));
    if (!row.shown) {
      const why = own("td", "why", row.why);
      why.colSpan = COLUMNS.length - 1;
      one.append(why);
      return one;
    }
    for (const column of COLUMNS.slice(1)) {
      const cell = el("td");
      if (column.fill) column.fill(cell, row);
      else cell.textContent = column.say(row);
      one.append(cell);
    }
    return one;
  }

  const lines = new Map(rows.map((row) => [row, line(row)]));

  function compare(a, b) {
    const [x, y] = [sorted.value(a), sorted.value(b)];
    if (x === null || y === null) return (x === null) - (y === null); // what is not known stands last
    const order = typeof x === "string" ? x.localeCompare(y, "en", {numeric: true}) : x - y;
    return falling ? -order : order;
  }

  function list() {
    listed = rows.filter((row) => kind === "all" || row.kind === kind);
    if (sorted) listed = [...listed].sort(compare);
    body.replaceChildren(...listed.map((row) => lines.get(row)));
    at("none").hidden = listed.length > 0;
    at("scroller").hidden = listed.length === 0;
    at("count").textContent = listed.length === rows.length ? `${rows.length} rows` : `${listed.length} of ${rows.length} rows`;
    lay();
  }

  function header() {
    for (const column of COLUMNS) {
      const cell = el("th"), button = el("button", "", column.name);
      cell.scope = "col";
      button.type = "button";
      button.addEventListener("click", () => {
        falling = sorted === column ? !falling : column !== COLUMNS[0]; // numbers begin with the most
        sorted = column;
        for (const other of head.cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
        list();
      });
      cell.append(button);
      head.append(cell);
    }
  }

  function find(row) {
    if (!listed.includes(row)) {
      at("tools").elements.kind.value = kind = "all";
      list();
    }
    const there = lines.get(row);
    for (const other of lines.values()) other.classList.toggle("found", other === there);
    there.scrollIntoView({block: "center"});
    there.focus({preventScroll: true});
  }

  // The chart

  const chart = at("chart"), tip = at("tip");
  let view = data.mixed ? "all" : "shown";
  let marks = []; // row, place and element of each point, cheapest first
  let current = 0; // the one that Tab goes to

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((one) => one * power >= rough) * power;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(Number((i * step).toPrecision(6)));
    return found;
  }

  function ratios(low, high, wanted) {
    for (const marks of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
        for (const mark of marks) {
          const value = Number((mark * 10 ** power).toPrecision(6));
          if (value >= low && value <= high) found.push(value);
        }
      }
      if (found.length <= wanted || marks.length === 1) return found;
    }
    return [];
  }

  const worthy = (row) => row.points[view];
  const bars = (row) => row.kind === "reuse" && row.points[view][2] > 0;

  function plot() {
    const shown = rows.filter(worthy);
    if (!shown.length) return;
    const width = at("chart-box").clientWidth, small = width < 560;
    if (!width) return;
    const height = clamp(Math.round(width * 0.48), 360, 580);
    const left = data.judged ? 46 : 62, right = 14, top = 26, bottom = 50;
    const seconds = shown.map((row) => row.points[view][0]);
    const values = shown.flatMap((row) => [row.points[view][1], ...(bars(row) ? [1, -1].map((by) => row.points[view][1] + by * row.points[view][2]) : [])]);
    let [low, high] = [Math.min(...seconds), Math.max(...seconds)], [least, most] = [Math.min(...values), Math.max(...values)];
    const log = high / low > LOG, turn = log ? Math.log : (value) => value;
    [low, high] = log ? [low / (high / low) ** 0.14, high * (high / low) ** 0.06] : [low - (high - low || high / 2) * 0.14, high + (high - low || high / 2) * 0.08];
    const pad = (most - least || Math.abs(most) || 1) * 0.06;
    [least, most] = [least - pad, most + pad];
    if (data.judged) [least, most] = [Math.max(least, -0.02), Math.min(most, 1.02)];
    const x = (value) => left + ((turn(value) - turn(low)) / (turn(high) - turn(low))) * (width - left - right);
    const y = (value) => height - bottom - ((clamp(value, least, most) - least) / (most - least)) * (height - top - bottom);
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.setAttribute("height", height);
    chart.classList.toggle("crowded", shown.filter(bars).length > CROWD);
    const drawn = document.createDocumentFragment(), paths = [];

    const grid = draw("g", "axes", {"aria-hidden": "true"});
    const digits = ticks(least * SCALE, most * SCALE, small ? 5 : 8);
    const places = Math.max(0, -Math.floor(Math.log10((digits[1] ?? 1) - (digits[0] ?? 0))));
    for (const value of digits) {
      const line = y(value / SCALE);
      grid.append(draw("line", "", {x1: left, x2: width - right, y1: line, y2: line}));
      grid.append(draw("text", "", {x: left - 10, y: line + 4, "text-anchor": "end"}, minus(value.toFixed(places))));
    }
    const across = log ? ratios(low, high, small ? 6 : 12) : ticks(low, high, small ? 5 : 10).filter((value) => value > 0);
    for (const value of across) {
      grid.append(draw("line", "tick", {x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 5}));
      grid.append(draw("text", "", {x: x(value), y: height - bottom + 20, "text-anchor": "middle"}, String(value)));
    }
    grid.append(draw("line", "base", {x1: left, x2: width - right, y1: height - bottom, y2: height - bottom}));
    grid.append(draw("text", "", {x: width - right, y: height - 6, "text-anchor": "end"}, `seconds a request${log ? ", log scale" : ""}`));
    grid.append(draw("text", "", {x: 0, y: 11}, data.judged ? "score, %" : "score, CLIP-T"));
    drawn.append(grid);

    const path = (name, points) => {
      drawn.append(draw("path", name, {d: `M${points.map((point) => point.map((value) => value.toFixed(1)).join(" ")).join("L")}`, "aria-hidden": "true"}));
      for (let i = 1; i < points.length; i += 1) {
        const [[a, b], [c, d]] = [points[i - 1], points[i]], parts = Math.max(1, Math.ceil(Math.hypot(c - a, d - b) / 6));
        for (let part = 0; part <= parts; part += 1) paths.push([a + ((c - a) * part) / parts, b + ((d - b) * part) / parts]);
      }
    };
    const bent = (points) => points.flatMap(([taken, value], i) => { // lines are straight in seconds, whatever the scale
      const [later, then] = points[i + 1] ?? [taken, value], parts = later > taken && log ? 24 : 1;
      return Array.from({length: parts}, (_, part) => [x(taken + (part / parts) * (later - taken)), y(value + (part / parts) * (then - value))]);
    });
    const place = (row) => [x(row.points[view][0]), y(row.points[view][1])];
    const chains = new Map();
    for (const row of shown) {
      const chain = row.kind === "plain" ? `plain ${row.solver}` : row.kind === "peer" ? `peer ${row.label.split(":")[0]}` : "";
      if (chain) chains.set(chain, [...(chains.get(chain) ?? []), row]);
    }
    const solvers = [...new Set(shown.filter((row) => row.kind === "plain").map((row) => row.solver))];
    for (const [chain, members] of chains) {
      const kind = members[0].kind, second = kind === "plain" && solvers.indexOf(members[0].solver) > 0;
      const met = members.map((row) => row.points[view]).sort((a, b) => a[0] - b[0]);
      if (met.length > 1) path(`chain ${kind}${second ? " second" : ""}`, bent(met));
    }
    const hull = data.frontiers[view];
    if (hull.length) {
      const points = bent(hull);
      path("frontier", [...points, [width - right, points.at(-1)[1]]]);
    }

    const kinds = ["plain", "peer", "reuse"]; // the last are drawn over the others
    const among = chart.contains(document.activeElement), before = marks[current]?.row;
    marks = shown.map((row) => ({row, place: place(row)})).sort((a, b) => a.place[0] - b.place[0]);
    current = Math.max(0, marks.findIndex((mark) => mark.row === before));
    for (const mark of [...marks].sort((a, b) => kinds.indexOf(a.row.kind) - kinds.indexOf(b.row.kind))) {
      const [cx, cy] = mark.place, row = mark.row;
      const group = draw("g", `mark ${row.kind}${row.label === data.reference ? " reference" : ""}${row.kind === "plain" && solvers.indexOf(row.solver) > 0 ? " second" : ""}`, {
        role: "button", tabindex: marks.indexOf(mark) === current ? 0 : -1, "aria-label": tell(row).join(", "),
      });
      if (bars(row)) {
        const half = row.points[view][2], ends = [y(row.points[view][1] - half), y(row.points[view][1] + half)];
        group.append(draw("path", "bar", {d: `M${cx} ${ends[0]}V${ends[1]}M${cx - 4} ${ends[0]}h8M${cx - 4} ${ends[1]}h8`}));
        mark.ends = ends;
      }
      group.append(draw("circle", "near", {cx, cy, r: NEAR}), draw("path", "shape", {d: shape(row), transform: `translate(${cx} ${cy})`}));
      mark.element = group;
      group.addEventListener("pointerenter", () => point(mark));
      group.addEventListener("pointerleave", () => document.activeElement !== group && hush());
      group.addEventListener("focus", () => {
        marks[current].element.setAttribute("tabindex", -1);
        current = marks.indexOf(mark);
        group.setAttribute("tabindex", 0);
        point(mark);
      });
      group.addEventListener("blur", hush);
      group.addEventListener("click", () => find(row));
      drawn.append(group);
    }
    chart.replaceChildren(drawn);
    hush();
    write({left, right: width - right, top, bottom: height - bottom}, paths, small);
    if (among) marks[current].element.focus();
    say(solvers, hull.length > 0);
  }

  function shape(row) {
    if (row.kind === "reuse") return "M0-7.5 7.5 0 0 7.5-7.5 0Z";
    if (row.kind === "peer") return "M-4.5-4.5h9v9h-9Z";
    const r = row.label === data.reference ? 6.5 : 4.5;
    return `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`;
  }

  /** Names beside the points, those that matter most first; what finds no free place has none. */
  function write(frame, paths, small) {
    const taken = marks.map(({place: [x, y], row}) => {
      const half = row.kind === "plain" ? 5 : 7;
      return [x - half, y - half, x + half, y + half];
    });
    const crossed = marks.filter((mark) => mark.ends).map(({place: [x], ends}) => [x - 5, ends[0], x + 5, ends[1]]); // rather not
    const meet = (one, other) => one[0] < other[2] && other[0] < one[2] && one[1] < other[3] && other[1] < one[3];
    const words = (row) => {
      if (row.label === data.reference) return "dense";
      if (row.kind === "reuse") return cut(row.label, small ? 24 : 44);
      if (row.kind === "peer") return cut(row.label.split(":")[0], 24);
      return /steps=(\d+)/.exec(row.label)?.[1] ?? "";
    };
    const weight = (row) => (row.kind === "reuse" ? 0 : row.label === data.reference ? 1 : row.kind === "plain" ? 2 : 3);
    const named = new Set(), layer = draw("g", "names", {"aria-hidden": "true"});
    chart.prepend(layer);
    chart.append(layer);
    for (const mark of [...marks].sort((a, b) => weight(a.row) - weight(b.row))) {
      const text = words(mark.row), once = mark.row.kind === "peer" ? text : mark.row;
      if (!text || named.has(once)) continue;
      const label = draw("text", mark.row.kind, {}, text);
      layer.append(label);
      const wide = label.getComputedTextLength(), tall = 13, [x, y] = mark.place;
      let best = null;
      for (const gap of {peer: [11, 17], plain: [11, 19], reuse: [11, 19, 30, 46, 64, 90]}[mark.row.kind]) {
        for (const [dx, dy] of [[1, 0], [-1, 0], [0, -1], [0, 1], [1, -1], [-1, -1], [1, 1], [-1, 1]]) {
          const slant = dx && dy ? 0.75 : 1;
          const from = dx > 0 ? x + gap * slant : dx < 0 ? x - gap * slant - wide : x - wide / 2;
          const upon = y + dy * gap * slant - tall / 2 + (dy ? dy * 3 : 0);
          const box = [from - 2, upon - 1, from + wide + 2, upon + tall + 1];
          if (box[0] < frame.left || box[2] > frame.right || box[1] < frame.top - 8 || box[3] > frame.bottom) continue;
          if (taken.some((other) => meet(box, other))) continue;
          const lines = paths.filter(([a, b]) => a > box[0] && a < box[2] && b > box[1] && b < box[3]).length;
          const cost = gap + 40 * crossed.filter((other) => meet(box, other)).length + Math.min(30, 4 * lines);
          if (!best || cost < best.cost) best = {cost, box, from, upon, gap};
        }
      }
      if (!best) {
        label.remove();
        continue;
      }
      label.setAttribute("x", best.from.toFixed(1));
      label.setAttribute("y", (best.upon + tall - 2).toFixed(1));
      if (best.gap > 11 && mark.row.kind === "reuse") layer.prepend(draw("path", "leader", {d: `M${x} ${y}L${clamp(x, best.from, best.from + wide)} ${clamp(y, best.upon, best.upon + tall)}`}));
      taken.push(best.box);
      named.add(once);
    }
  }

  function tell(row) {
    const [seconds, value] = row.points[view], shown = row.shown, told = [row.label];
    const over = view === "all" && data.mixed ? row.all?.speedup : shown?.speedup;
    told.push(`${seconds.toFixed(2)} s${over ? `, ${over.toFixed(2)} times as fast` : ""}`);
    told.push(`score ${score(value)}${unit}${bars(row) ? ` ± ${score(row.points[view][2])}` : ""}`);
    const best = shown?.to_frontier;
    if (best && row.kind !== "plain") told.push(`${signed(best[0])}${sure(row, best) ? ` ${range(best)}` : ""} to the frontier${data.mixed && row.rate !== null ? " on hits" : ""}`);
    if (row.rate !== null) told.push(`${(100 * row.rate).toFixed(0)} % hits`);
    return told;
  }

  function point(mark) {
    const [first, ...others] = tell(mark.row);
    tip.replaceChildren(own("b", "", first), ...others.map((text) => el("span", "", text)));
    tip.hidden = false;
    const box = at("chart-box"), [x, y] = mark.place;
    const from = clamp(x + 16 + tip.offsetWidth > box.clientWidth ? x - 16 - tip.offsetWidth : x + 16, 0, Math.max(0, box.clientWidth - tip.offsetWidth));
    const under = from < x + 8 && from + tip.offsetWidth > x - 8; // it would hide its own point
    tip.style.left = `${from}px`;
    tip.style.top = `${under ? (y > tip.offsetHeight + 20 ? y - tip.offsetHeight - 16 : y + 16) : clamp(y - tip.offsetHeight / 2, 0, box.clientHeight - tip.offsetHeight)}px`;
  }
  const hush = () => (tip.hidden = true);

  chart.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !marks.length) return;
    const to = {ArrowRight: current + 1, ArrowDown: current + 1, ArrowLeft: current - 1, ArrowUp: current - 1, Home: 0, End: marks.length - 1}[event.key];
    if (to !== undefined) marks[clamp(to, 0, marks.length - 1)].element.focus();
    else if (event.key === "Enter" || event.key === " ") find(marks[current].row);
    else if (event.key === "Escape") hush();
    else return;
    event.preventDefault();
  });

  function say(solvers, frontier) {
    const entries = [["reuse", "rows that reuse, with 95 % intervals", rows.some((row) => row.kind === "reuse" && worthy(row))]];
    solvers.forEach((solver, i) => entries.push([i ? "plain second" : "plain", `plain sampling, ${solver} (number of steps)`, true]));
    entries.push(["peer", "in-request caches", rows.some((row) => row.kind === "peer" && worthy(row))], ["frontier", "the best mix of plain sampling", frontier]);
    at("chart-legend").replaceChildren(...entries.filter((entry) => entry[2]).map(([name, text]) => {
      const item = el("li"), sample = draw("svg", "sample", {viewBox: "-10 -10 20 20", "aria-hidden": "true"});
      if (name === "frontier") sample.append(draw("path", "frontier", {d: "M-10 0H10"}));
      else {
        const group = draw("g", `mark ${name}`);
        group.append(draw("path", "shape", {d: shape({kind: name.split(" ")[0], label: ""})}));
        sample.append(group);
      }
      item.append(sample, el("span", "", text));
      return item;
    }));
    const middle = !data.mixed ? "Median seconds." : view === "all" ? "Mean over all requests, hits and misses." : "Rows that reuse over their hits, others over all requests; median seconds.";
    at("speed-lead").textContent = `Up and to the left is better: what lies above the dashed line, no mix of plain sampling gives for the same seconds. ${middle}`;
  }

  // Attributes

  function parts() {
    const judged = (row) => row?.shown?.attributes.length;
    const dense = byLabel.get(data.reference), reuse = rows.filter((row) => row.kind === "reuse" && judged(row));
    if (!reuse.length) return;
    const labels = new Set(reuse.flatMap((row) => row.shown.control.split(", ")));
    const controls = rows.filter((row) => row !== dense && row.kind !== "reuse" && labels.has(row.label) && judged(row));
    const order = [...(judged(dense) ? [[dense, "reference"]] : []), ...reuse.map((row) => [row, ""]), ...controls.map((row) => [row, "control"])];
    const least = Math.floor(Math.min(...order.flatMap(([row]) => row.shown.attributes)) * 10 - 1e-9) / 10;
    const from = Math.max(0, least), place = (value) => (100 * (value - from)) / (1 - from || 1);
    const head = at("dots").tHead.rows[0];
    for (const text of ["row", ...data.attributes]) head.append(Object.assign(el("th", "", text), {scope: "col"}));
    for (const [row, role] of order) {
      const line = el("tr", role || "reuse");
      line.append(name(row, role === "control" ? "control" : role ? "full render" : `n ${row.shown.count}`));
      row.shown.attributes.forEach((value, i) => {
        const cell = el("td"), track = el("i", "track"), dot = el("i", "dot");
        dot.style.left = `${place(value)}%`;
        if (judged(dense)) {
          const rule = el("i", "rule");
          rule.style.left = `${place(dense.shown.attributes[i])}%`;
          track.append(rule);
        }
        track.append(dot);
        cell.append(track, el("b", "", (100 * value).toFixed(1)));
        line.append(cell);
      });
      at("dots").tBodies[0].append(line);
    }
    at("parts").hidden = false;
    const lead = at("parts").querySelector(".lead");
    lead.textContent += from > 0 ? ` Tracks run from ${(100 * from).toFixed(0)} to 100.` : "";
  }

  // The map of requests

  const heat = at("heat"), lanes = at("lanes"), cursor = at("cursor");
  const mapped = rows.filter((row) => row.outcomes);
  const count = data.cases.length;
  const dense = byLabel.get(data.reference);
  const tracks = new Map();
  let order = data.cases.map((_, i) => i); // requests as they stand from left to right
  let laid = []; // rows as they stand from top to bottom
  let here = null; // [row, place] of the cursor

  function lane(row) {
    const one = el("div", "lane"), label = el("span", "label"), track = el("div", "track");
    label.append(el("i", `swatch ${row.kind}`), own("span", "", row.label));
    const cells = draw("svg", "cells", {viewBox: `0 0 ${count} 10`, preserveAspectRatio: "none", "shape-rendering": "crispEdges", "aria-hidden": "true"});
    track.append(cells);
    one.append(label, track);
    tracks.set(row, {one, track, cells});
  }

  function color(row) {
    const inset = count <= AIRY ? 0.07 : 0, found = {};
    const add = (name, from, to, top, tall) => (found[name] = `${found[name] ?? ""}M${from + inset} ${top}H${to - inset}v${tall}H${from + inset}Z`);
    const thin = (request) => row.rate !== null && row.cells.hit[request] === "0";
    const look = (i) => `${row.outcomes[order[i]]}${thin(order[i])}`;
    for (let from = 0, to = 0; from < count; from = to) {
      for (to = from + 1; !inset && to < count && look(to) === look(from); to += 1); // cells that touch are one
      const outcome = row.outcomes[order[from]], [top, tall] = thin(order[from]) ? [3.5, 3] : [0, 10];
      if (outcome !== "g") add(OUTCOMES[outcome][0], from, to, top, tall);
      else {
        add("right", from, to, top + tall / 2, tall / 2);
        add("gained", from, to, top, tall / 2);
      }
    }
    tracks.get(row).cells.replaceChildren(...Object.entries(found).map(([name, d]) => draw("path", name, {d})));
  }

  function lay() {
    if (!tracks.size) return;
    laid = listed.filter((row) => tracks.has(row));
    lanes.replaceChildren(cursor, ...laid.map((row) => tracks.get(row).one));
    if (here && !laid.includes(here[0])) here = null;
    mark();
  }

  function mark() {
    cursor.hidden = !here;
    at("readout").replaceChildren(el("span", "", here ? "" : "Point at a cell, or go there with the arrow keys."));
    if (!here) return;
    const [row, place] = here, track = tracks.get(row).track, request = order[place];
    cursor.style.left = `${track.offsetLeft + (place / count) * track.offsetWidth}px`;
    cursor.style.width = `${Math.max(4, track.offsetWidth / count)}px`;
    cursor.style.top = `${track.offsetTop}px`;
    cursor.style.height = `${track.offsetHeight}px`;
    const [name, words] = OUTCOMES[row.outcomes[request]];
    at("readout").replaceChildren(el("b", name, `Request ${data.cases[request] + 1}: ${words}`), own("bdi", "", cut(row.label, 80)), own("span", "", cut(data.prompts[request], 200) || "no prompt"));
  }

  function follow() { // keeps the cursor in sight
    if (cursor.hidden) return;
    const [row] = here, edge = getComputedStyle(tracks.get(row).one).display === "grid" ? tracks.get(row).track.offsetLeft : 0;
    const left = cursor.offsetLeft, right = left + cursor.offsetWidth;
    if (left < heat.scrollLeft + edge) heat.scrollLeft = left - edge;
    else if (right > heat.scrollLeft + heat.clientWidth - 14) heat.scrollLeft = right - heat.clientWidth + 14;
    tracks.get(row).one.scrollIntoView({block: "nearest"});
  }

  function under(event) {
    const track = event.target.closest?.(".track");
    const row = track && laid.find((one) => tracks.get(one).track === track);
    if (!row) return null;
    const box = track.getBoundingClientRect();
    return [row, clamp(Math.floor(((event.clientX - box.left) / box.width) * count), 0, count - 1)];
  }

  function map() {
    if (!mapped.length || !count || !dense?.outcomes) return;
    at("requests").hidden = false;
    lanes.style.setProperty("--wide", `${count * CELL}px`);
    for (const row of mapped) {
      lane(row);
      color(row);
    }
    at("thin").hidden = !mapped.some((row) => row.rate !== null && row.cells.hit.includes("0"));
    lanes.addEventListener("pointermove", (event) => {
      const found = under(event);
      if (found && (found[0] !== here?.[0] || found[1] !== here?.[1])) {
        here = found;
        mark();
      }
    });
    lanes.addEventListener("click", (event) => {
      here = under(event) ?? here;
      if (under(event)) show();
    });
    heat.addEventListener("focus", () => {
      here ??= [laid[0], 0];
      if (laid.length) mark();
    });
    heat.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || !laid.length) return;
      here ??= [laid[0], 0];
      const [row, place] = here, up = laid.indexOf(row);
      if (event.key === "Enter" || event.key === " ") show();
      else {
        const to = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -count], End: [0, count], PageUp: [0, -10], PageDown: [0, 10]}[event.key];
        if (!to) return;
        here = [laid[clamp(up + to[0], 0, laid.length - 1)], clamp(place + to[1], 0, count - 1)];
        mark();
        follow();
      }
      event.preventDefault();
    });
    at("order").addEventListener("change", () => {
      const losses = data.cases.map((_, i) => mapped.filter((row) => row.outcomes[i] === "l").length * 1000 + mapped.filter((row) => row.outcomes[i] === "w").length);
      const request = here && order[here[1]];
      order = data.cases.map((_, i) => i);
      if (at("order").value === "lost") order.sort((a, b) => losses[b] - losses[a]);
      mapped.forEach(color);
      if (here) here = [here[0], order.indexOf(request)];
      mark();
    });
    lay();
  }

  // The dialog

  const detail = at("detail"), sheet = at("sheet");
  let open = null;

  function section(heading, ...parts) {
    const one = el("section");
    one.append(el("h3", "", heading), ...parts);
    return one;
  }

  function clip(row, request) {
    const kept = data.videos[row.label];
    const box = el("figure", "clip"), told = el("figcaption");
    told.append(el("i", `swatch ${row.kind}`), own("span", "", row.label), el("small", "", `${row.cells.seconds[request].toFixed(2)} s`));
    box.append(told);
    if (!kept?.kept.includes(request)) return kept || data.videos[data.reference] ? (box.append(el("p", "notes", "There is no clip of it in videos/.")), box) : null;
    const frame = el("div", "stage"), video = el("video");
    Object.assign(video, {muted: true, loop: true, playsInline: true, controls: true, preload: "metadata"});
    video.setAttribute("aria-label", `Clip of ${row.label}`);
    video.src = `./videos/${encodeURIComponent(kept.folder)}/${String(data.cases[request]).padStart(4, "0")}.mp4`;
    video.addEventListener("error", () => video.hasAttribute("src") && frame.replaceChildren(el("span", "empty", "this clip cannot be read")));
    video.addEventListener("loadedmetadata", () => video.videoHeight && frame.style.setProperty("--ratio", video.videoWidth / video.videoHeight));
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) video.autoplay = true;
    frame.append(video);
    box.append(frame);
    return box;
  }

  function readings(row, request) {
    const columns = row === dense ? [dense] : [row, dense], table = el("table", "read"), head = el("tr");
    head.append(Object.assign(el("th", "", "attribute"), {scope: "col"}));
    for (const one of columns) head.append(Object.assign(own("th", "", one.label), {scope: "col"}));
    table.append(el("thead"), el("tbody"));
    table.tHead.append(head);
    data.attributes.forEach((attribute, i) => {
      const line = el("tr");
      line.append(Object.assign(el("th", "", attribute), {scope: "row"}));
      const read = columns.map((one) => data.texts[one.cells.reading[request]][i]);
      columns.forEach((one, at) => {
        const cell = own("td", "", read[at] || "–");
        if (one.wrong?.[request].includes(i)) {
          cell.classList.add("loss");
          cell.append(el("small", "", "wrong"));
        } else if (!one.wrong && at === 0 && read.length > 1 && read[0] !== read[1]) cell.classList.add("differs");
        line.append(cell);
      });
      table.tBodies[0].append(line);
    });
    return section("What the judge reads", table);
  }

  function donors(row, request) {
    const places = data.texts[row.cells.donors[request]] ?? [], why = data.texts[row.cells.why[request]];
    const earlier = (place) => data.prompts[data.cases.indexOf(-1 - place)];
    const found = places.map((place) => (place >= 0 ? data.donors[place] : earlier(place))).filter(Boolean);
    if (row.rate === null || (!why && !found.length)) return null;
    const hit = row.cells.hit[request] === "1";
    const one = section(hit ? "Why it is a hit" : "Why it is a miss", own("p", "", why || (hit ? "reused" : "rendered in full")));
    for (const prompt of found) one.append(own("p", "notes", `Donor: ${prompt}`));
    return one;
  }

  function fill() {
    const [row, place] = open, request = order[place], [name, words] = OUTCOMES[row.outcomes[request]];
    const count = rows.filter((one) => one.outcomes && one.outcomes[request] === "l").length;
    at("detail-title").textContent = `Request ${data.cases[request] + 1}`;
    at("detail-badge").textContent = words;
    at("detail-badge").className = `badge ${name}`;
    const prompt = own("p", "said", data.prompts[request] || "no prompt");
    if (data.prompts[request].length > 420) {
      prompt.classList.add("long");
      prompt.tabIndex = 0;
    }
    const clips = el("div", "clips"), told = el("div", "told");
    clips.append(...(row === dense ? [row] : [row, dense]).map((one) => clip(one, request)).filter(Boolean));
    told.append(...[section("Prompt", prompt), donors(row, request), section("Rows that lose here", el("p", "", `${count} of ${mapped.length}`))].filter(Boolean));
    clear();
    sheet.append(told, readings(row, request));
    if (clips.childElementCount) sheet.prepend(clips);
    else sheet.prepend(Object.assign(own("p", "notes row-name", `${row.label}, ${row.cells.seconds[request].toFixed(2)} s; dense ${dense.cells.seconds[request].toFixed(2)} s`)));
    detail.scrollTop = 0;
    for (const [id, by] of [["previous", -1], ["next", 1]]) at(id).setAttribute("aria-disabled", String(place + by < 0 || place + by >= data.cases.length));
  }

  function clear() {
    for (const video of sheet.querySelectorAll("video")) {
      video.pause();
      video.removeAttribute("src");
      video.load();
    }
    sheet.replaceChildren();
  }

  function show() {
    open = here;
    mark();
    fill();
    if (!detail.open) detail.showModal();
  }

  function turn(across, down = 0) {
    const [row, place] = open, to = laid[clamp(laid.indexOf(row) + down, 0, laid.length - 1)];
    if (place + across < 0 || place + across >= count) return;
    here = [to, place + across];
    show();
  }

  at("previous").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));
  at("close").addEventListener("click", () => detail.close());
  detail.addEventListener("close", () => {
    clear();
    open = null;
    heat.focus({preventScroll: true});
    follow();
  });
  detail.addEventListener("click", (event) => event.target === detail && detail.close());
  detail.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.matches(".long, video")) return;
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });

  // Begin

  header();
  map();
  list();
  parts();
  for (const input of at("tools").elements.kind) {
    input.addEventListener("change", () => {
      kind = input.value;
      list();
    });
  }
  for (const input of at("view").elements.over) {
    input.addEventListener("change", () => {
      view = input.value;
      plot();
    });
  }
  for (const id of ["tools", "view"]) {
    at(id).reset();
    at(id).addEventListener("submit", (event) => event.preventDefault());
  }
  at("order").value = "order";
  at("view").hidden = !data.mixed;
  at("speed").hidden = !rows.some(worthy);
  let wide = 0;
  new ResizeObserver(() => {
    if (at("chart-box").clientWidth === wide) return;
    wide = at("chart-box").clientWidth;
    plot();
    if (here) mark();
  }).observe(at("chart-box"));
  wide = at("chart-box").clientWidth;
  plot();
  performance.mark("ready");
})();
