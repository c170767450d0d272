  // --- the same question elsewhere ------------------------------------------------------------------------------

  function flat(body, prefix = "") {
    return Object.entries(body).flatMap(([name, value]) => (value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${prefix}${name}.`) : [[prefix + name, value]]));
  }
  // A value as the command line's grammar (Hydra's) has it.
  function hydra(value) {
    if (Array.isArray(value)) return `[${value.map(hydra).join(",")}]`;
    if (value && typeof value === "object") return `{${Object.entries(value).map(([name, held]) => `${name}:${hydra(held)}`).join(",")}}`;
    const text = String(value);
    return typeof value === "string" && !/^[\w./:+-]+$/.test(text) ? `'${text.replaceAll("\\", "\\\\").replaceAll("'", "\\'")}'` : text;
  }
  const shell = (word) => (/^[\w./:=,+-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  const VERBS = { search_serving: "search serving" }; // others are called as they are asked
  function asCommand(tab, body) {
    const specs = new Map(allFields(tab).map((spec) => [spec.name, spec]));
    const path = (name) => specs.get(name)?.path || name;
    if (body.axes) {
      const { verb, axes, ...fixed } = body;
      const lists = Object.entries(axes).map(([name, values]) => `${path(name)}=${values.map(hydra).join(",")}`);
      return ["opcast sweep", verb, ...[...flat(fixed).map(([name, value]) => `${path(name)}=${hydra(value)}`), ...lists].map(shell)].join(" ");
    }
    const words = flat(body).map(([name, value]) => `${name === "op.kind" ? "op" : specs.get(name)?.path || name}=${hydra(value)}`);
    return ["opcast", VERBS[FORMS[tab].verb] ?? FORMS[tab].verb, ...words.map(shell)].join(" ");
  }
  function python(value) {
    if (value === null) return "None";
    if (typeof value === "boolean") return value ? "True" : "False";
    if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
    if (typeof value === "object") return `{${Object.entries(value).map(([name, held]) => `${JSON.stringify(name)}: ${python(held)}`).join(", ")}}`;
    return JSON.stringify(value);
  }
  function asPython(tab, body) {
    if (body.axes) {
      const { verb, ...settings } = body;
      const given = Object.entries(settings).map(([name, value]) => `${name}=${python(value)}`);
      return `import opcast\n\nanswer = opcast.sweep(${[python(verb), ...given].join(", ")})\nprint(answer.to_dict())`;
    }
    const { op, ...rest } = body;
    const named = Object.entries(op ? { ...Object.fromEntries(Object.entries(op).filter(([name]) => name !== "kind")), ...rest } : rest);
    const words = named.map(([name, value]) => `${name}=${python(value)}`);
    return `import opcast\n\nanswer = opcast.${FORMS[tab].verb}(${[...(op ? [python(op.kind)] : []), ...words].join(", ")})\nprint(answer.to_dict())`;
  }
  function asHttp(path, body) {
    return `curl -s ${location.origin}${path} -H 'Content-Type: application/json' -d ${shell(JSON.stringify(body))}`;
  }
  function copied(what, text) {
    const button = make("button", { type: "button", onclick: async () => {
      try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select the text and copy it"; }
      setTimeout(() => { button.textContent = what; }, 2000);
    } }, what);
    return button;
  }
  function elsewhere(tab, path, body, found) {
    const spelling = (title, text, id) => make("details", { class: "spelling" }, make("summary", {}, title), make("pre", { tabindex: 0, id }, text), copied("Copy", text));
    return make("section", { id: "elsewhere" }, make("h2", {}, "Take this question along"),
      make("p", { class: "lead" }, "The address of this page holds the question: whoever opens it here sees the same answer."),
      make("p", {}, copied("Copy the link", location.href)),
      spelling("As a command", asCommand(tab, body), "as-command"), spelling("In Python", asPython(tab, body), "as-python"), spelling("Over HTTP", asHttp(path, body), "as-http"),
      make("details", {}, make("summary", {}, "The whole answer as JSON"), make("pre", { tabindex: 0, id: "as-json" }, JSON.stringify(found, null, 1))));
  }

  // --- comparing ---------------------------------------------------------------------------------------------------

  const pins = () => JSON.parse(stored(sessionStorage, "opcast-pins") || "[]");
  function pin(tab, body, figures) {
    stored(sessionStorage, "opcast-pins", JSON.stringify([...pins(), { tab, body, figures }].slice(-6)));
    $("status").textContent = `Pinned; ${pins().length} ${pins().length === 1 ? "answer" : "answers"} to compare.`;
  }
  const changed = (value, base) => (value > 10 * base ? `${rounded(value / base)} times` : `${value >= base ? "+" : "−"}${Math.abs((100 * (value - base)) / base).toFixed(1)} %`);
  const WRITTEN = { us: seconds, ms: (ms) => seconds(ms === null ? null : ms * 1e3), s: (s) => seconds(s * 1e6), share: percent, gib: (gib) => `${rounded(gib)} GiB`, gbps: (rate) => `${rounded(rate)} GB/s`, w: (watts) => `${rounded(watts)} W`, j: (joules) => (joules >= 1e6 ? `${rounded(joules / 1e6)} MJ` : joules >= 1e3 ? `${rounded(joules / 1e3)} kJ` : `${rounded(joules)} J`), count: rounded };
  function comparison() {
    const held = pins();
    if (held.length < 2) return make("p", { class: "caption" }, `${held.length} of at least two answers are pinned.`);
    const heads = held.map((_, at) => `answer ${at + 1}`);
    const settings = held.map((each) => new Map(flat(each.body)));
    const label = (name) => held.map((each) => allFields(each.tab).find((spec) => spec.name === name)?.label).find(Boolean) || name.replace(/^op\./, "").replaceAll(/[._]/g, " ");
    const asked = [];
    for (const name of new Set(settings.flatMap((each) => [...each.keys()]))) {
      const values = settings.map((each) => each.get(name));
      if (values.some((value) => String(value) !== String(values[0]))) asked.push({ setting: label(name), ...Object.fromEntries(values.map((value, at) => [heads[at], value === undefined ? "as usual" : typeof value === "number" ? rounded(value) : String(value)])) });
    }
    const kinds = new Map(held.flatMap((each) => each.figures.map(([name, , kind]) => [name, kind])));
    const found = [...kinds].map(([name, kind]) => {
      const values = held.map((each) => each.figures.find((figure) => figure[0] === name)?.[1]);
      const base = values[0];
      return { figure: name, ...Object.fromEntries(values.map((value, at) => {
        const change = at && base && typeof value === "number" ? ` (${changed(value, base)})` : "";
        return [heads[at], typeof value === "number" ? WRITTEN[kind](value) + change : "–"];
      })) };
    });
    const clear = make("button", { type: "button", onclick: () => { stored(sessionStorage, "opcast-pins", "[]"); show(); } }, "Let go of all");
    const times = held.map((each) => each.figures[0]);
    const said = times[0][0] === times[1][0] && times[0][1] ? `${times[0][0][0].toUpperCase()}${times[0][0].slice(1)} of answer 2 is ${WRITTEN[times[0][2]](times[1][1])}, ${Math.abs(100 * (times[1][1] / times[0][1] - 1)).toFixed(1)} % ${times[1][1] < times[0][1] ? "less" : "more"} than the ${WRITTEN[times[0][2]](times[0][1])} of answer 1.` : "";
    return make("div", {}, said && make("p", { class: "verdict", id: "said" }, said), asked.length ? make("h2", {}, "What was asked otherwise") : null, asked.length ? table("What was asked otherwise", ["setting", ...heads], asked) : null,
      make("h2", {}, "What came of it"), table("What came of it", ["figure", ...heads], found), make("p", { class: "caption" }, clear));
  }
