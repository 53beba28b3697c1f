"use strict";
(() => {
  const CHUNK = 60; // cards made at once
  const NEAR = "1200px"; // below the window, where the next are made
  const WAIT = 110; // milliseconds a pointer rests on a card before it plays
  const BARS = 300; // in the chart, at most; more videos share one
  const LONG = 420; // characters of a prompt that is set small
  const STEPS = {attended: "read the donor", corrected: "corrected", plain: "plain", skipped: "left out"};

  const at = (id) => document.getElementById(id);
  const {cards, again, written} = JSON.parse(at("data").textContent);
  const byKey = new Map(cards.map((card) => [card.key, card]));
  const grid = at("grid"), detail = at("detail"), sheet = at("sheet"), end = at("end"), form = at("card").content;
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  let shown = cards; // those that match, in their order
  let made = 0; // how many of them have a card
  let current = 0; // the one that Tab goes to
  let open = null; // what the dialog shows

  const el = (tag, name = "", text = "") => {
    const one = document.createElement(tag);
    if (name) one.className = name;
    if (text) one.textContent = text;
    return one;
  };
  const own = (text) => Object.assign(el("p", "", text), {dir: "auto"});
  const link = (file) => `./${encodeURIComponent(file)}`;
  const picture = (name) => `./posters/${encodeURIComponent(name)}`;
  const poster = (card) => picture(card.file.replace(/\.[^.]*$/, "") + ".jpg");
  const hash = (key) => `#v=${encodeURIComponent(key)}`;
  const cut = (text, length) => (text.length > length ? text.slice(0, length).replace(/[\uD800-\uDBFF]$/, "") + "…" : text);
  const span = (seconds) =>
    seconds >= 600 ? `${(seconds / 60).toFixed(1)} min` : `${seconds.toFixed(seconds < 0.095 ? 3 : seconds < 10 ? 2 : 1)} s`;
  const number = (card) => (card.index === null ? "–" : String(card.index));

  // Cards

  function make(card, place) {
    const cell = form.cloneNode(true).firstElementChild;
    const anchor = cell.firstElementChild;
    const find = (name) => anchor.querySelector(name);
    anchor.href = hash(card.key);
    anchor.dataset.place = place;
    anchor.tabIndex = place === current ? 0 : -1;
    find(".number").textContent = number(card);
    find(".badge").textContent = card.kind;
    find(".badge").classList.add(card.kind);
    find(".time").textContent = card.total ? span(card.total) : "";
    find(".prompt").textContent = cut(card.prompt, 240) || card.file || card.key;
    find(".why").textContent = cut(card.why, 240);
    if (card.poster) {
      const image = el("img");
      image.loading = "lazy";
      image.decoding = "async";
      image.alt = "";
      image.src = poster(card);
      find(".frame").append(image);
    } else {
      find(".empty").textContent = missing(card);
    }
    return cell;
  }

  function missing(card) {
    if (card.kind === "failed") return "no video";
    return card.video ? "no picture" : "the file is gone";
  }

  function more(least = made + 1) {
    if (made >= shown.length) return;
    const part = document.createDocumentFragment();
    const stop = Math.min(shown.length, Math.max(least, made + CHUNK));
    for (; made < stop; made += 1) part.append(make(shown[made], made));
    grid.append(part);
    nearing.unobserve(end); // observed anew it tells at once if it is still near
    if (made < shown.length) nearing.observe(end);
  }
  const nearing = new IntersectionObserver((entries) => entries.at(-1).isIntersecting && more(), {rootMargin: `0px 0px ${NEAR} 0px`});

  function select() {
    const words = at("search").value.toLowerCase().normalize().split(/\s+/).filter(Boolean);
    const kind = at("tools").elements.filter.value;
    const order = at("sort").value;
    const kept = cards.filter((card) => (kind === "all" || card.kind === kind) && words.every((word) => text(card).includes(word)));
    if (order === "time") kept.sort((a, b) => b.total - a.total);
    if (order === "alike") kept.sort((a, b) => (b.similarity ?? -2) - (a.similarity ?? -2));
    stop();
    shown = kept;
    made = current = 0;
    grid.replaceChildren();
    more();
    at("none").hidden = shown.length > 0;
    at("count").textContent = shown.length === cards.length ? `${cards.length} shown` : `${shown.length} of ${cards.length} shown`;
  }
  const text = (card) => (card.lower ??= `${card.prompt}\n${card.file}`.toLowerCase().normalize());

  let asked = 0;
  const selectSoon = () => {
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(select);
  };

  // Keyboard in the grid

  const settled = (then) => setTimeout(() => requestAnimationFrame(then), 50); // by then what is on screen has its own height

  const anchorAt = (place) => grid.children[place]?.firstElementChild;

  function go(place) {
    const to = Math.max(0, Math.min(shown.length - 1, place));
    if (to >= made) more(to + 1);
    const before = anchorAt(current), after = anchorAt(to);
    if (!after) return;
    if (before) before.tabIndex = -1;
    after.tabIndex = 0;
    current = to;
    after.focus({preventScroll: true});
    const bring = () => current === to && after.scrollIntoView({block: "nearest"});
    bring();
    settled(bring);
  }

  function step(key) {
    const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
    const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns};
    if (key === "Home") return 0;
    if (key === "End") return shown.length - 1;
    const to = current + (moves[key] ?? NaN);
    return to >= 0 && to < shown.length ? to : key === "ArrowDown" && current < shown.length - 1 ? shown.length - 1 : NaN;
  }

  grid.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) return;
    event.preventDefault();
    const to = step(event.key);
    if (!Number.isNaN(to)) go(to);
  });

  // Clips in the grid: one at a time, only while its card is pointed at or focused, and on screen

  let playing = null, about = null, resting = 0; // the clip, the card it is of or soon will be, and the timer until then

  function stop() {
    clearTimeout(resting);
    about = null;
    if (!playing) return;
    leaving.disconnect();
    playing.pause();
    playing.removeAttribute("src");
    playing.load();
    playing.remove();
    playing = null;
  }

  function play(anchor) {
    const card = shown[anchor.dataset.place];
    if (about === anchor || still.matches || !card.video || detail.open || document.hidden) return;
    const frame = anchor.querySelector(".frame");
    stop();
    about = anchor;
    resting = setTimeout(() => {
      playing = clip(card);
      playing.setAttribute("aria-hidden", "true");
      playing.tabIndex = -1;
      frame.append(playing);
      leaving.observe(frame);
      start(playing);
    }, WAIT);
  }
  const leaving = new IntersectionObserver((entries) => entries.at(-1).isIntersecting || stop());

  function clip(card) {
    const video = el("video");
    video.muted = video.loop = video.playsInline = true;
    video.disablePictureInPicture = true;
    if (card.poster) video.poster = poster(card);
    video.src = link(card.file);
    return video;
  }
  const start = (video) => video.play().catch(() => {}); // a clip that cannot be read leaves its poster

  const near = (event) => event.target.closest?.(".card");
  grid.addEventListener("pointerover", (event) => event.pointerType !== "touch" && near(event) && play(near(event)));
  grid.addEventListener("pointerout", (event) => {
    if (near(event) && !near(event).contains(event.relatedTarget) && !near(event).matches(":focus")) stop();
  });
  grid.addEventListener("focusin", (event) => {
    if (!near(event)) return;
    const place = Number(near(event).dataset.place);
    if (place !== current) {
      anchorAt(current)?.setAttribute("tabindex", "-1");
      near(event).tabIndex = 0;
      current = place;
    }
    play(near(event));
  });
  grid.addEventListener("focusout", stop);
  document.addEventListener("visibilitychange", () => document.hidden && stop());
  still.addEventListener("change", stop);

  // The dialog

  function section(heading, ...parts) {
    const one = el("section");
    if (heading) one.append(el("h3", "", heading));
    one.append(...parts);
    return one;
  }

  function marked(tag, words, found) {
    const one = el(tag);
    one.dir = "auto";
    const wanted = [...new Set(found.filter(Boolean))].sort((a, b) => b.length - a.length);
    const parts = wanted.map((word) => word.trim().split(/\s+/).map((bit) => bit.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("\\s+"));
    if (!parts.length) {
      one.textContent = words;
      return one;
    }
    const sought = new RegExp(`(?<![\\p{L}\\p{N}])(?:${parts.join("|")})(?![\\p{L}\\p{N}])`, "giu");
    let from = 0;
    for (const hit of words.matchAll(sought)) {
      one.append(words.slice(from, hit.index), el("mark", "", hit[0]));
      from = hit.index + hit[0].length;
    }
    one.append(words.slice(from));
    return one;
  }

  function long(words) {
    words.classList.add("long");
    words.tabIndex = 0; // it scrolls by itself
  }

  function stage(card) {
    const box = el("div"), frame = el("div", "stage");
    box.append(frame);
    if (card.ratio) frame.style.setProperty("--ratio", Math.max(0.6, Math.min(2.4, card.ratio)));
    if (!card.video) {
      frame.classList.add("bare");
      frame.append(el("span", "empty", missing(card)));
      return box;
    }
    const video = clip(card), under = el("div", "under"), button = el("button", "plain play", "Play"), file = el("a", "plain", "Open mp4");
    video.setAttribute("aria-label", `Video ${number(card)}`);
    button.type = "button";
    const say = () => (button.textContent = video.paused ? "Play" : "Pause");
    const turn = () => (video.paused ? start(video) : video.pause());
    button.addEventListener("click", turn);
    video.addEventListener("click", turn);
    video.addEventListener("play", say);
    video.addEventListener("pause", say);
    video.addEventListener("error", () => {
      if (!video.hasAttribute("src")) return;
      button.replaceWith(el("span", "notes", "It cannot be played here."));
      video.replaceWith(card.poster ? Object.assign(el("img"), {src: poster(card), alt: ""}) : el("span", "empty", missing(card)));
    });
    file.href = link(card.file);
    file.target = "_blank";
    file.rel = "noopener";
    under.append(button, file);
    frame.append(video);
    box.append(under);
    if (!still.matches) start(video);
    return box;
  }

  function donor(card) {
    if (!card.donor_prompt && !card.source && !card.picture) return null;
    const box = el("div", "donor bare"), told = el("div"), source = byKey.get(card.source);
    const src = source?.poster ? poster(source) : card.picture ? picture(card.picture) : "";
    if (src) {
      const thumb = el(source ? "a" : "span", "thumb"), image = el("img");
      if (source) thumb.href = hash(source.key);
      image.alt = source ? `Donor, video ${number(source)}` : "Donor";
      image.addEventListener("error", () => {
        thumb.remove();
        box.classList.add("bare");
      });
      image.src = src;
      thumb.append(image);
      box.append(thumb);
      box.classList.remove("bare");
    }
    const words = marked("p", card.donor_prompt, card.shared.map((pair) => pair[1]));
    words.className = "words";
    if (card.donor_prompt.length > LONG) long(words);
    told.append(el("h3", "", source ? `Donor: video ${number(source)}` : "Donor"), words);
    const alike = card.shared.filter((pair) => pair[2] !== null).map(([mine, theirs, value]) => `${mine === theirs ? mine : `${mine} ~ ${theirs}`} ${value.toFixed(2)}`);
    if (card.similarity !== null) alike.push(`whole prompt ${card.similarity.toFixed(2)}`);
    if (alike.length) {
      const line = own(`Similarity: ${alike.join(", ")}`);
      line.className = "alike";
      told.append(line);
    }
    if (source) {
      const under = el("div", "under"), go = el("a", "plain", "Open the donor");
      go.href = hash(source.key);
      under.append(go);
      told.append(under);
    }
    box.append(told);
    return box;
  }

  function strip(parts, label) {
    const bar = el("div", "strip");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", label);
    for (const [name, share] of parts) {
      const one = el("i", name);
      one.style.flexGrow = share;
      bar.append(one);
    }
    return bar;
  }

  function legend(entries) {
    const list = el("ul", "legend");
    for (const [name, words, value] of entries) {
      const item = el("li");
      item.append(el("i", `swatch ${name}`), el("span", "", words), el("b", "", value));
      list.append(item);
    }
    return list;
  }

  function steps(card) {
    const total = card.steps.reduce((sum, run) => sum + run[1], 0);
    if (!total) return null;
    const cells = total > 80 ? card.steps : card.steps.flatMap(([kind, count]) => Array(count).fill([kind, 1]));
    const counts = Object.keys(STEPS).map((kind) => [kind, card.steps.reduce((sum, run) => sum + (run[0] === kind) * run[1], 0)]);
    const told = counts.filter((one) => one[1]).map(([kind, count]) => [kind, STEPS[kind], String(count)]);
    const ran = total - counts.find((one) => one[0] === "skipped")[1];
    const heading = ran < total ? `Steps: ${ran} instead of ${total}` : `Steps: ${total}`;
    return section(heading, strip(cells, told.map((one) => `${one[2]} ${one[1]}`).join(", ")), legend(told));
  }

  function time(card) {
    const total = card.seconds.reduce((sum, part) => sum + part[1], 0);
    if (!total) return null;
    const told = card.seconds.map(([part, value]) => [part, part, span(value)]);
    const saved = card.saved > 0 ? `, ${span(card.saved)} saved` : "";
    return section(`Time: ${span(card.total || total)}${saved}`, strip(card.seconds, told.map((one) => `${one[1]} ${one[2]}`).join(", ")), legend(told));
  }

  function facts(card) {
    if (!card.settings.length) return null;
    const list = el("dl", "facts");
    for (const [name, value] of card.settings) {
      const pair = el("div", value.length > 28 ? "wide" : ""), said = el("dd", "", value.replaceAll(",", ",\u200b"));
      said.dir = "auto";
      pair.append(el("dt", "", name), said);
      list.append(pair);
    }
    return section("Settings", list);
  }

  function command(card) {
    if (!card.command) return null;
    const box = el("section", "command"), under = el("div", "under"), button = el("button", "plain", "Copy this command"), code = el("pre", "", card.command);
    button.type = "button";
    code.tabIndex = 0;
    code.setAttribute("role", "group");
    code.setAttribute("aria-label", "Command");
    button.addEventListener("click", async () => {
      const copied = await copy(card.command, code);
      button.textContent = copied ? "Copied" : "Press Ctrl+C";
      setTimeout(() => (button.textContent = "Copy this command"), 2000);
    });
    under.append(el("h3", "", "Repeat this video"), button);
    box.append(under, code);
    return box;
  }

  async function copy(words, code) {
    try {
      await navigator.clipboard.writeText(words);
      return true;
    } catch {
      getSelection().selectAllChildren(code);
      return false;
    }
  }

  function fill(card) {
    const words = marked("p", card.prompt || "no prompt", card.shared.map((pair) => pair[0]));
    words.className = "said";
    if (card.prompt.length > LONG) long(words);
    const reason = own(card.why);
    reason.className = `reason ${card.kind}`;
    const outcome = section({failed: "Why it failed", hit: "Why it is a hit", miss: "Why it is a miss"}[card.kind] ?? "Outcome", reason);
    for (const note of [card.unstored && `Not stored: ${card.unstored}`, ...card.notes].filter(Boolean)) {
      outcome.append(Object.assign(own(note), {className: "notes"}));
    }
    const told = el("div", "told");
    told.append(section("Prompt", words));
    if (card.why) told.append(outcome);
    told.append(...[donor(card), steps(card), time(card)].filter(Boolean));
    at("detail-title").textContent = card.index === null ? card.key : `Video ${card.index}`;
    at("detail-badge").textContent = card.kind;
    at("detail-badge").className = `badge ${card.kind}`;
    empty();
    sheet.append(...[stage(card), told, facts(card), command(card)].filter(Boolean));
    detail.scrollTop = 0;
    for (const [id, by] of [["previous", -1], ["next", 1]]) at(id).setAttribute("aria-disabled", String(!beside(card, by)));
  }

  function empty() {
    const video = sheet.querySelector("video");
    if (video) {
      video.pause();
      video.removeAttribute("src");
      video.load();
    }
    sheet.replaceChildren();
  }

  function beside(card, by) {
    const among = shown.includes(card) ? shown : cards;
    return among[among.indexOf(card) + by];
  }

  function turn(by) {
    const card = open && beside(open, by);
    if (!card) return;
    history.replaceState(null, "", hash(card.key));
    show(card);
  }

  function show(card) {
    stop();
    open = card;
    fill(card);
    if (!detail.open) {
      detail.showModal();
      at("detail-title").focus();
    } else if (!detail.contains(document.activeElement)) at("detail-title").focus();
  }

  function followHash() {
    const card = byKey.get(keyOf(location.hash));
    if (card) show(card);
    else if (detail.open) detail.close();
  }

  function keyOf(fragment) {
    if (!fragment.startsWith("#v=")) return null;
    try {
      return decodeURIComponent(fragment.slice(3));
    } catch {
      return null;
    }
  }

  detail.addEventListener("close", () => {
    const place = shown.indexOf(open);
    empty();
    open = null;
    if (location.hash) history.replaceState(null, "", location.pathname + location.search);
    if (place >= 0) go(place);
  });
  detail.addEventListener("click", (event) => event.target === detail && detail.close());
  for (const moved of ["wheel", "touchmove"]) { // beside the dialog the page behind it stays where it is
    detail.addEventListener(moved, (event) => event.target === detail && event.preventDefault(), {passive: false});
  }
  detail.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.matches("pre, .long")) return;
    if (event.key === " " && !event.target.matches("button, a")) {
      event.preventDefault();
      sheet.querySelector(".play")?.click();
    }
    if (event.key === "ArrowLeft") turn(-1);
    if (event.key === "ArrowRight") turn(1);
  });
  at("previous").addEventListener("click", () => turn(-1));
  at("next").addEventListener("click", () => turn(1));
  at("close").addEventListener("click", () => detail.close());
  addEventListener("hashchange", followHash);

  // The chart

  function chart() {
    const timed = cards.filter((card) => card.total > 0);
    if (timed.length < 2) return;
    const size = Math.ceil(timed.length / BARS);
    const bars = [];
    for (let i = 0; i < timed.length; i += size) {
      const some = timed.slice(i, i + size), mean = (of) => some.reduce((sum, card) => sum + of(card), 0) / some.length;
      const hit = mean((card) => (card.kind === "hit" ? card.total : 0));
      bars.push({some, hit, took: mean((card) => card.total), dense: mean((card) => card.total + card.saved)});
    }
    const top = ceiling(Math.max(...bars.map((bar) => Math.max(bar.dense, bar.took))));
    const width = Math.max(bars.length, 24), inset = bars.length > 120 ? 0 : 0.14;
    const column = (bar, i, value) => `M${i + inset} 100V${(100 - (100 * value) / top).toFixed(2)}H${i + 1 - inset}V100Z`;
    const path = (name, of) => {
      const one = document.createElementNS("http://www.w3.org/2000/svg", "path");
      one.setAttribute("class", name);
      one.setAttribute("d", bars.map((bar, i) => (of(bar) ? column(bar, i, of(bar)) : "")).join(""));
      return one;
    };
    const plot = at("plot");
    plot.setAttribute("viewBox", `0 0 ${width} 100`);
    plot.append(
      path("dense", (bar) => bar.dense > bar.took && bar.dense),
      path("rest", (bar) => bar.took > bar.hit && bar.took), // the share of hits stands before it
      path("hit", (bar) => bar.hit),
    );
    const hits = timed.filter((card) => card.kind === "hit").length;
    plot.setAttribute("aria-label", `Seconds of ${timed.length} videos, ${hits} of them hits, up to ${span(top)}`);
    at("tick-top").textContent = `${top} s`;
    at("tick-mid").textContent = `${top / 2} s`;
    at("chart").hidden = false;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const bar = bars[Math.floor(((event.clientX - box.left) / box.width) * width)];
      at("readout").textContent = bar ? tell(bar) : "";
    });
    plot.addEventListener("pointerleave", () => (at("readout").textContent = ""));
  }

  function tell({some, took, dense}) {
    const last = some.length > 1 ? `–${number(some.at(-1))}, mean` : "";
    return `${number(some[0])}${last}: ${span(took)}${dense > took ? ` instead of ${span(dense)}` : ""}`;
  }

  function ceiling(value) {
    const power = 10 ** Math.floor(Math.log10(value));
    return Number(([1, 2, 4, 5, 10].find((one) => one * power >= value) * power).toPrecision(3));
  }

  // While videos are being made: read the page anew now and then, when nobody is in the middle of something

  const PLACE = `chai ${location.pathname}`;
  const LONGEST = 600; // seconds between two looks, where nothing came for long
  let pause = again; // seconds until the next look

  function follow() {
    let touched = performance.now();
    const touch = () => (touched = performance.now());
    for (const input of ["pointermove", "pointerdown", "keydown", "wheel", "scroll"]) addEventListener(input, touch, {passive: true});
    setInterval(() => {
      if (!at("follow").checked || document.hidden || detail.open || performance.now() - touched < 1000 * pause) return;
      touch();
      location.reload();
    }, Math.min(1000, 500 * again));
  }

  function onScreen() {
    return Math.max(0, [...grid.children].findIndex((cell) => cell.getBoundingClientRect().bottom > 0));
  }

  function leave() {
    const [search, filter, sort] = [at("search").value, at("tools").elements.filter.value, at("sort").value];
    const focus = document.activeElement.matches(".card") ? {card: shown[current].key} : {id: document.activeElement.id};
    const place = onScreen(), top = grid.children[place]?.getBoundingClientRect().top;
    const kept = {search, filter, sort, focus, y: scrollY, card: shown[place]?.key, top, tall: tall(), written, pause, follow: at("follow")?.checked};
    try {
      sessionStorage.setItem(PLACE, JSON.stringify(kept));
    } catch {} // without a memory it begins at the top
  }

  function comeBack() {
    let kept = null;
    try {
      kept = JSON.parse(sessionStorage.getItem(PLACE));
      sessionStorage.removeItem(PLACE);
    } catch {}
    history.scrollRestoration = "auto";
    if (!kept || performance.getEntriesByType("navigation")[0]?.type !== "reload") return;
    history.scrollRestoration = "manual";
    if (again) at("follow").checked = kept.follow ?? true;
    if (again && kept.written === written) {
      pause = Math.min(LONGEST, 2 * kept.pause);
      const since = new Date(1000 * written).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});
      if (pause > 8 * again) at("news").textContent = `nothing new since ${since}: at work on a long video, or stopped; look by itself`;
    }
    at("search").value = kept.search;
    at("tools").elements.filter.value = kept.filter;
    at("sort").value = kept.sort;
    if (kept.tall) tall(kept.tall);
    select();
    const placeOf = (key) => shown.findIndex((card) => card.key === key);
    const first = placeOf(kept.card), focused = placeOf(kept.focus.card);
    const least = Math.max(first, focused) + CHUNK / 3;
    if (least > made) more(least);
    scrollTo(0, kept.y);
    if (kept.top < 0 && first >= 0) scrollBy(0, grid.children[first].getBoundingClientRect().top - kept.top); // below the header by card
    if (focused >= 0) {
      current = focused;
      anchorAt(0).tabIndex = -1;
      anchorAt(current).tabIndex = 0;
      anchorAt(current).focus({preventScroll: true});
    } else if (kept.focus.id) at(kept.focus.id)?.focus({preventScroll: true});
  }

  const tall = (set) => { // of cards not yet drawn
    const style = document.documentElement.style;
    if (set) style.setProperty("--tall", set);
    return style.getPropertyValue("--tall");
  };

  // Begin

  const ratios = cards.map((card) => card.ratio).filter(Boolean).sort((a, b) => a - b);
  const ratio = Math.max(0.8, Math.min(1.9, ratios[ratios.length >> 1] ?? 1.6));
  document.documentElement.style.setProperty("--ratio", ratio);
  for (const input of at("tools").elements.filter) {
    const count = cards.filter((card) => input.value === "all" || card.kind === input.value).length;
    input.nextElementSibling.textContent += ` ${count}`;
    input.addEventListener("change", selectSoon);
  }
  at("search").addEventListener("input", selectSoon);
  at("sort").addEventListener("change", selectSoon);
  at("tools").addEventListener("submit", (event) => event.preventDefault());
  at("clear").addEventListener("click", () => {
    at("tools").reset();
    select();
    at("search").focus();
  });
  if (!cards.some((card) => card.similarity !== null)) at("sort").querySelector("[value=alike]").remove();
  select();
  comeBack();
  if (again) follow();
  addEventListener("pagehide", leave);
  settled(() => made && !tall() && tall(`${anchorAt(onScreen()).offsetHeight}px`));
  chart();
  followHash();
  performance.mark("ready");
})();
