  // --- fields: made from the declaration of settings (forms.py) -------------------------------------------------

  const idOf = (name) => `field-${name.replaceAll(".", "-")}`;
  // A field {name, label, help, kind, list, choices, default, usual} as a label, its control, and what it means.
  async function field(spec) {
    const id = idOf(spec.name);
    const names = spec.names ? (await known(spec.names)).map((row) => row.id) : spec.choices || [];
    const usual = Array.isArray(spec.usual) ? spec.usual.join(", ") : typeof spec.usual === "object" && spec.usual ? JSON.stringify(spec.usual) : (spec.usual ?? "");
    const shownDefault = spec.default === null || spec.default === undefined || String(spec.default) === "" ? "" : Array.isArray(spec.default) ? spec.default.join(", ") : typeof spec.default === "object" ? "" : String(spec.default);
    const about = { id, name: spec.name, title: spec.help || null, "data-kind": spec.kind, "data-list": Boolean(spec.list) };
    let input;
    if (spec.strict || spec.kind === "flag" && !spec.list) {
      const choices = spec.kind === "flag" ? [["", `usual (${spec.default === true ? "yes" : spec.default === false ? "no" : "as the engine has it"})`], ["true", "yes"], ["false", "no"]]
        : [...(spec.required ? [] : [["", shownDefault ? `usual (${shownDefault})` : spec.empty || "none"]]), ...names.map((name) => [name, name])];
      input = make("select", about, ...choices.map(([value, label]) => make("option", { value }, label)));
      input.value = String(usual);
    } else {
      const numeric = (spec.kind === "integer" || spec.kind === "number") && !spec.list;
      const list = names.length ? make("datalist", { id: `${id}-list` }, ...names.map((value) => make("option", { value }))) : null;
      input = make("input", { ...about, type: numeric ? "number" : "text", step: numeric ? (spec.kind === "number" ? "any" : 1) : null, required: spec.required,
        placeholder: spec.list ? shownDefault || "natural" : shownDefault || (spec.kind === "json" ? "as JSON" : null), value: usual, list: list && list.id });
      if (list) return make("div", { class: "field" }, make("label", { for: id }, spec.label), input, list);
    }
    return make("div", { class: "field" }, make("label", { for: id }, spec.label), input);
  }
  const LISTED = new Set(["workload", "traffic.arrival", "cache"]); // choices that are all there are
  const EMPTY = { cluster: "one device", device: "the cluster's", stack: "usual" };
  function shaped(spec) {
    const strict = LISTED.has(spec.name) && spec.choices.length > 0 || ["cluster", "device", "stack", "precision"].includes(spec.name);
    return { ...spec, strict, empty: EMPTY[spec.name], default: ["device"].includes(spec.name) ? null : spec.default, required: spec.name === "model" || spec.name === "workload" };
  }
  const read = (spec, workload) => !spec.of.length || !workload || spec.of.includes(workload);
  async function group(legend, specs) {
    return make("fieldset", {}, make("legend", {}, legend), ...await Promise.all(specs.map(shaped).map(field)));
  }
  // The groups of a form, and all other settings of its verb folded away; what the kind of work does not read is left out.
  async function filled(form, spec, asked, first = []) {
    const workload = spec.id === "step" ? asked.workload || "train" : "";
    const groups = spec.groups.map((each) => [each.legend, each.fields.filter((one) => read(one, workload))]);
    form.append(...first, ...await Promise.all(groups.map(([legend, fields]) => group(legend, fields))));
    const more = spec.more.filter((one) => read(one, workload));
    const folded = make("details", { class: "more" }, make("summary", {}, `${more.length} more settings`), await group("", more));
    folded.open = more.some((one) => asked[one.name] !== undefined);
    form.append(folded);
  }

  const spelled = (text) => /^[[{]/.test(text.trim());
  function valueOf(input) {
    const kind = input.dataset.kind;
    const text = input.value.trim();
    if (input.dataset.list === "" && !spelled(text)) {
      const words = text.split(kind === "text" ? /\s*,\s*/ : /[\s,]+/).filter(Boolean);
      return words.map((word) => (kind === "integer" || kind === "number" ? numbered(word) : kind === "flag" ? word === "true" || word === "yes" : word));
    }
    if (kind === "json" || spelled(text)) return JSON.parse(text);
    if (kind === "integer" || kind === "number") return numbered(text);
    return kind === "flag" ? text === "true" : text;
  }
  function numbered(text) {
    if (!Number.isFinite(Number(text))) throw new Error("must be a number");
    return Number(text);
  }
  // What a form says, by the names of its settings; an error stands at its field.
  function valuesOf(form) {
    const values = {};
    for (const input of form.elements) {
      if (!input.name || (input.value === "" && !input.validity?.badInput)) continue;
      try {
        if (input.validity?.badInput) throw new Error("must be a number");
        values[input.name] = valueOf(input);
      } catch (error) {
        throw Object.assign(new Error(error instanceof SyntaxError ? "is neither a plain value nor JSON" : error.message), { field: input.name });
      }
    }
    return values;
  }
  // What stands in the fields, as the page's address has it.
  const textsOf = (form) => Object.fromEntries([...form.elements].filter((input) => input.name && input.value !== "").map((input) => [input.name, input.value]));
  // A name of the address: that of a field, or the end of one (links of before).
  function fieldNamed(form, name) {
    return form.elements.namedItem(name) || [...form.elements].find((input) => input.name && input.name.endsWith(`.${name}`)) || null;
  }
  function fill(form, asked) {
    for (const [name, value] of Object.entries(asked)) {
      const input = fieldNamed(form, name);
      if (!input || !("value" in input)) continue;
      if (input.tagName === "SELECT" && ![...input.options].some((option) => option.value === value)) input.append(make("option", { value }, value));
      input.value = value;
    }
  }
  // Names with dots as mappings within mappings.
  function nested(values) {
    const body = {};
    for (const [name, value] of Object.entries(values)) {
      const parts = name.split(".");
      const last = parts.pop();
      let place = body;
      for (const part of parts) place = place[part] ??= {};
      place[last] = value;
    }
    return body;
  }

  // --- errors at their field ---------------------------------------------------------------------------------------

  function allFields(tab) {
    const form = FORMS[tab];
    return form ? [...form.groups.flatMap((each) => each.fields), ...form.more] : [];
  }
  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  // The field of the form that a message is about: the one whose name stands first in it.
  function blamed(form, tab, message) {
    let first = null;
    for (const input of form.elements) {
      if (!input.name) continue;
      const path = allFields(tab).find((spec) => spec.name === input.name)?.path || input.name;
      const last = input.name.split(".").pop();
      for (const pattern of [`(?<![\\w.])(?:${escaped(path)}|${escaped(input.name)})(?=[=:\\s])`, `(?<=^|[\\s.])${escaped(last)}=`, `^(?:unknown )?${escaped(last)}\\s`]) {
        const at = message.search(new RegExp(pattern));
        if (at >= 0 && (!first || at < first.at || (at === first.at && path.length > first.path.length))) first = { at, input, path };
      }
    }
    return first;
  }
  function atField(form, tab, error) {
    const found = error.field ? { input: form.elements.namedItem(error.field), path: error.field } : blamed(form, tab, error.message);
    if (!found?.input) return false;
    const { input } = found;
    const label = form.querySelector(`label[for="${input.id}"]`).textContent;
    const said = make("p", { class: "error", id: `${input.id}-error`, role: "alert" }, make("b", {}, label), `: ${error.message}`);
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", said.id);
    for (let fold = input.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    input.closest(".field").append(said);
    input.focus({ preventScroll: true });
    input.closest(".field").scrollIntoView({ block: "center", behavior: "instant" });
    return true;
  }
  function forgive(form) {
    for (const said of form.querySelectorAll(".field .error")) said.remove();
    for (const input of form.querySelectorAll("[aria-invalid]")) { input.removeAttribute("aria-invalid"); input.removeAttribute("aria-describedby"); }
  }
