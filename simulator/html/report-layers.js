// A timeline of stages x time x kinds of work on a canvas, which is turned by dragging; returns what draws it anew.
// Kinds stand on one another, or apart in layers. Stages, then tasks, then kinds are kept apart by planes, so that
// drawing the farther first is exact.
function opcastLayers(figure) {
  "use strict";
  const data = JSON.parse(figure.querySelector("script").textContent);
  const canvas = figure.querySelector("canvas");
  const hint = figure.querySelector(".hint");
  const legend = figure.querySelector(".layer-legend");
  const context = canvas.getContext("2d");
  const hidden = new Set();
  const ROW = Math.min(1.3, 9 / data.stages), DEPTH = ROW * data.stages;
  const small = matchMedia("(max-width: 640px)").matches;
  const LENGTH = small ? 9 : 16, WHOLE = small ? 2.2 : 1.5, LAYER = 0.7; // how high a whole task is, stacked and in a layer
  const TICKS = small ? 4 : 5, RADIANS = Math.PI / 180;
  let yaw, tilt, apart = false, drawn = [], pointed = null;

  function stand() { // on a narrow screen more from the side, to use its height
    yaw = small ? 52 : 24;
    tilt = small ? 40 : 34;
  }

  // Each shown bar with its lowest and highest point: on those of the same task before it, or in its layer.
  function heights() {
    const place = new Map(data.layers.map((_, at) => at).filter((at) => !hidden.has(at)).map((layer, at) => [layer, at]));
    const tops = new Map();
    const standing = data.bars.filter((bar) => place.has(bar[2])).map((bar) => {
      const low = apart ? LAYER * place.get(bar[2]) : tops.get(bar[0]) ?? 0;
      const top = low + bar[5] * (apart ? 0.92 * LAYER : WHOLE);
      tops.set(bar[0], top);
      return [bar, low, top];
    });
    return [standing, standing.reduce((most, each) => Math.max(most, each[2]), 0.1)];
  }

  // --- from time, row and height to the canvas
  function view(high) {
    const [c, s, ct, st] = [Math.cos(yaw * RADIANS), Math.sin(yaw * RADIANS), Math.cos(tilt * RADIANS), Math.sin(tilt * RADIANS)];
    const flat = (x, y, z) => {
      const [a, b] = [x - LENGTH / 2, y - DEPTH / 2];
      return [a * c + b * s, -(z - high / 2) * ct - (b * c - a * s) * st];
    };
    const corners = [0, LENGTH].flatMap((x) => [0, DEPTH].flatMap((y) => [0, high].map((z) => flat(x, y, z))));
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const [xs, ys] = [corners.map((p) => p[0]), corners.map((p) => p[1])];
    const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const pad = small ? 30 : 60;
    const scale = Math.min((width - 2 * pad) / (right - left), (height - 56) / (bottom - top || 1));
    const [ox, oy] = [width / 2 - scale * (left + right) / 2, height / 2 - scale * (top + bottom) / 2 - 6];
    const at = (x, y, z) => { const [u, v] = flat(x, y, z); return [ox + scale * u, oy + scale * v]; };
    return { at, c, s, near: c >= 0 ? 0 : DEPTH, side: s >= 0 ? LENGTH : 0 };
  }

  function polygon(points, fill, stroke) {
    context.beginPath();
    points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.closePath();
    if (fill) { context.fillStyle = fill; context.fill(); }
    if (stroke) { context.strokeStyle = stroke; context.lineWidth = 0.5; context.stroke(); }
  }

  function shade(hex, by) { // a colour of the page, darker
    const parts = [1, 3, 5].map((i) => Math.round(parseInt(hex.slice(i, i + 2), 16) * by));
    return `rgb(${parts.join()})`;
  }

  // --- a bar: its top and the two sides that face the reader
  function box(see, x0, x1, y0, y1, z0, z1, colours, edge) {
    const front = see.near ? y1 : y0, side = see.side ? x1 : x0;
    const faces = [];
    if (tilt < 89.5 && Math.abs(see.c) > 0.02) faces.push([[[x0, front, z0], [x1, front, z0], [x1, front, z1], [x0, front, z1]], colours[1]]);
    if (tilt < 89.5 && Math.abs(see.s) > 0.02) faces.push([[[side, y0, z0], [side, y1, z0], [side, y1, z1], [side, y0, z1]], colours[2]]);
    if (tilt > 0.5) faces.push([[[x0, y0, z1], [x1, y0, z1], [x1, y1, z1], [x0, y1, z1]], colours[0]]);
    const points = faces.map(([corners]) => corners.map((corner) => see.at(...corner)));
    points.forEach((face, i) => polygon(face, faces[i][1], edge));
    return points;
  }

  function draw() {
    if (!canvas.isConnected || !canvas.clientWidth) return;
    if (yaw === undefined) stand();
    const ratio = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const [standing, high] = heights();
    const see = view(high);
    const shades = data.layers.map(([, hue]) => [1, 0.86, 0.74, 0.6].map((by) => shade(colour(hue), by)));
    const length = LENGTH / data.end;
    // the ground of each stage
    for (let stage = 0; stage < data.stages; stage++) {
      const [y0, y1] = [ROW * stage + 0.08 * ROW, ROW * (stage + 0.92)];
      polygon([[0, y0, 0], [LENGTH, y0, 0], [LENGTH, y1, 0], [0, y1, 0]].map((p) => see.at(...p)), colour("grid"));
    }
    standing.sort(([a, low], [b, other]) =>
      (see.c >= 0 ? b[1] - a[1] : a[1] - b[1]) || (see.s >= 0 ? a[3] - b[3] : b[3] - a[3]) || low - other);
    drawn = standing.map(([bar, low, top]) => {
      const [, stage, layer, start, end] = bar;
      const edge = bar === pointed ? colour("text") : shades[layer][3];
      return [bar, box(see, start * length, end * length, ROW * (stage + 0.14), ROW * (stage + 0.86), low, top, shades[layer], edge)];
    });
    letters(see, colour, length);
  }

  // --- stages at the end of their rows, time along the front
  function letters(see, colour, length) {
    context.font = `${small ? 10.5 : 12}px system-ui, sans-serif`;
    context.fillStyle = colour("muted");
    context.textBaseline = "middle";
    const every = Math.ceil(data.stages / 16);
    const names = tilt > 0.5 && (Math.abs(see.c) > 0.25 || Math.abs(see.s) > 0.25);
    const end = see.side, out = end ? 0.15 : -0.15;
    for (let stage = 0; names && stage < data.stages; stage += every) {
      const [x, y] = see.at(end + out, ROW * (stage + 0.5), 0);
      context.textAlign = x > canvas.clientWidth / 2 ? "left" : "right";
      context.fillText(small ? stage : `stage ${stage}`, x, y);
    }
    const step = [1, 2, 2.5, 5, 10].map((each) => each * 10 ** Math.floor(Math.log10(data.end / TICKS))).find((each) => data.end / each <= TICKS + 1) || data.end;
    context.textAlign = "center";
    for (let tick = 0; tick <= data.end * 1.0001; tick += step) {
      const [x, y] = see.at(tick * length, see.near + (see.near ? 0.1 : -0.1), 0);
      context.fillText(`${Number(tick.toPrecision(3))}\u00a0${data.unit}`, x, y + 12);
    }
  }

  // --- what a bar is
  function inside(points, x, y) {
    let within = false;
    for (let i = 0, j = points.length - 1; i < points.length; j = i++) {
      const [[xi, yi], [xj, yj]] = [points[i], points[j]];
      if ((yi > y) !== (yj > y) && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) within = !within;
    }
    return within;
  }
  function point(event) {
    const area = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - area.left, event.clientY - area.top];
    const found = drawn.findLast(([, faces]) => faces.some((face) => inside(face, x, y)));
    if ((found?.[0] ?? null) !== pointed) {
      pointed = found?.[0] ?? null;
      draw();
    }
    hint.hidden = !pointed;
    if (!pointed) return;
    const [task, stage, layer, start, end, share] = pointed;
    const bold = document.createElement("b");
    const figureOf = (value) => {
      const us = value * data.unit_us;
      const [divisor, unit] = us < 1e3 ? [1, "µs"] : us < 1e6 ? [1e3, "ms"] : [1e6, "s"];
      return `${Number((us / divisor).toPrecision(3))}\u00a0${unit}`;
    };
    bold.textContent = data.layers[layer][0];
    hint.replaceChildren(bold, document.createElement("br"), `stage ${stage}, ${data.tasks[task]}: ${(100 * share).toFixed(share < 0.1 ? 1 : 0)}\u00a0% of ${figureOf(end - start)}, from ${figureOf(start)}`);
    hint.style.left = `${Math.max(Math.min(x + 12, area.width - hint.offsetWidth), 0)}px`;
    hint.style.top = `${y > area.height / 2 ? y - hint.offsetHeight - 10 : y + 14}px`;
  }

  function turn(by, up) {
    yaw = (yaw + by + 540) % 360 - 180;
    tilt = Math.min(Math.max(tilt + up, 0), 90);
    hint.hidden = true;
    draw();
  }
  let from = null;
  canvas.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!from) return void point(event);
    turn((from[0] - event.clientX) * 0.4, event.pointerType === "touch" ? 0 : (event.clientY - from[1]) * 0.4);
    from = [event.clientX, event.clientY];
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => { from = null; if (name === "pointerup") point(event); });
  canvas.addEventListener("pointerleave", () => { pointed = null; hint.hidden = true; draw(); });
  canvas.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: [-15, 0], ArrowRight: [15, 0], ArrowUp: [0, -10], ArrowDown: [0, 10] };
    if (!(event.key in keys)) return;
    event.preventDefault();
    turn(...keys[event.key]);
  });
  for (const button of figure.querySelectorAll(".zoom button")) {
    button.addEventListener("click", () => {
      if ("turn" in button.dataset || "tilt" in button.dataset) return turn(Number(button.dataset.turn ?? 0), Number(button.dataset.tilt ?? 0));
      if ("apart" in button.dataset) {
        apart = !apart;
        button.setAttribute("aria-pressed", String(apart));
      } else if (button.dataset.view) [yaw, tilt] = button.dataset.view.split(",").map(Number);
      else stand();
      turn(0, 0);
    });
  }
  data.layers.forEach(([name, hue], layer) => {
    const button = document.createElement("button"), mark = document.createElement("i");
    button.type = "button";
    mark.style.background = `var(--${hue})`;
    button.append(mark, name);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!hidden.delete(layer)) hidden.add(layer);
      button.setAttribute("aria-pressed", String(!hidden.has(layer)));
      draw();
    });
    legend.append(button);
  });
  new ResizeObserver(draw).observe(canvas);
  return draw;
}
