  // --- what can be asked --------------------------------------------------------------------------------------

  const plain = (tab) => ({
    form: (form, asked) => filled(form, FORMS[tab], asked),
    body: (values) => nested(values),
  });
  const dimField = (dim, usual) => ({ name: `op.${dim.name}`, label: dim.name.replaceAll("_", " "), kind: dim.choices.length ? "text" : "integer", choices: dim.choices, default: dim.default, usual, strict: dim.choices.length > 0, of: [] });
  async function opFields(asked, kinds, usual) {
    const chosen = kinds.find((op) => op.kind === (asked["op.kind"] || asked.kind)) || kinds.find((op) => op.kind === usual.kind);
    const kind = { name: "op.kind", label: "kind of operator", kind: "text", choices: kinds.map((op) => op.kind), strict: true, required: true, usual: chosen.kind, of: [] };
    const dims = chosen.dims.map((dim) => dimField(dim, chosen.kind === usual.kind ? usual[dim.name] : undefined));
    return { chosen, fields: [kind, ...dims] };
  }
  async function specFieldset(legend, specs) {
    return make("fieldset", {}, make("legend", {}, legend), ...await Promise.all(specs.map(field)));
  }
  const TABS = {
    op: {
      ...plain("op"),
      example: true,
      async form(form, asked) {
        const { chosen, fields } = await opFields(asked, await known("ops"), { kind: "gemm", m: 4096, n: 4096, k: 4096 });
        const dtype = { name: "op.dtype", label: "number format", kind: "text", choices: DTYPES, strict: true, required: true, usual: "bf16", of: [] };
        const sizes = chosen.dims.filter((dim) => !dim.choices.length).map((dim) => dim.name);
        const vary = { name: "vary", label: "picture over", kind: "text", choices: sizes, strict: true, empty: "nothing", usual: sizes.includes("m") ? "m" : "", of: [] };
        await filled(form, FORMS.op, asked, [await specFieldset("Operator", [...fields, dtype]), await specFieldset("Picture", [vary])]);
        form.elements.namedItem("op.kind").addEventListener("change", (event) => go("op", { "op.kind": event.target.value }, false));
      },
      body({ vary, ...values }) { return nested(values); },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/predict", body, signal);
        const centre = Number(body.op[values.vary]);
        const curve = values.vary && centre > 0 ? await varied(body, values.vary, signal) : null;
        return { path: "/v1/predict", body, found, shown: [opCard(found), curve], figures: [["latency", found.latency_us, "us"], ["low end of the interval", found.low_us, "us"], ["high end of the interval", found.high_us, "us"], ["roofline", found.roofline_us, "us"]] };
      },
    },
    step: {
      ...plain("step"),
      async form(form, asked) {
        await filled(form, FORMS.step, asked);
        form.elements.workload.addEventListener("change", () => go("step", textsOf(form), false));
      },
      body(values) {
        const held = { ...values };
        if (!held.cluster) for (const spec of allFields("step")) if (/^(parallel|cluster)\./.test(spec.path)) delete held[spec.name];
        return nested(held);
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/simulate", body, signal);
        const report = await call("/v1/simulate/report?part=body", body, signal); // after it: the graph is known by then
        return { path: "/v1/simulate", body, found, shown: [found.fits ? null : tooLarge(found), reported(report)], figures: stepFigures(found) };
      },
    },
    job: {
      ...plain("job"),
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/plan", body, signal);
        const report = await call("/v1/plan/report?part=body", body, signal);
        const figures = [];
        for (const [name, title] of [["days", "days"], ["gpu_hours", "GPU-hours"], ["cost", "price"], ["kwh", "kWh"], ["goodput", "goodput"]]) for (const part of ["p10", "p50", "p90"]) if (found[name]) figures.push([`${title} ${part}`, found[name][part], name === "goodput" ? "share" : "count"]);
        return { path: "/v1/plan", body, found, shown: [reported(report)], figures };
      },
    },
    sweep: {
      ...plain("sweep"),
      async form(form, asked) {
        const names = FORMS.sweep.groups.flatMap((each) => each.fields).concat(FORMS.sweep.more).map((spec) => spec.name);
        const axis = (at, name, values) => [
          { name: `axis.${at}`, label: "setting", kind: "text", choices: names, strict: true, empty: "none", usual: name, of: [] },
          { name: `values.${at}`, label: "its values, as 4, 8", kind: "text", choices: [], list: true, usual: values, of: [] },
        ];
        await filled(form, FORMS.sweep, asked, [await specFieldset("Axes", [...axis(1, "nodes", ["4", "8"]), ...axis(2, "", [])])]);
      },
      body(values) {
        const body = { verb: "plan" };
        const axes = {};
        const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);
        for (const at of [1, 2]) if (values[`axis.${at}`]) axes[values[`axis.${at}`]] = (values[`values.${at}`] ?? []).map(number);
        const fixed = Object.entries(values).filter(([name]) => !/^(axis|values)\./.test(name) && !(name in axes));
        return { ...body, ...nested(Object.fromEntries(fixed)), axes };
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await streamed("/v1/sweep", body, signal);
        return { path: "/v1/sweep", body, found, shown: [sweepTable(found)], figures: null };
      },
    },
    posttrain: {
      ...plain("posttrain"),
      body(values) { // the example's responses belong to methods that roll out
        const usual = allFields("posttrain").find((spec) => spec.name === "responses").usual;
        const { responses, ...others } = values;
        const unread = !["ppo", "grpo"].includes(values.method) && String(responses) === String(usual);
        return nested(unread ? others : values);
      },
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/posttrain", body, signal);
        const report = await call("/v1/posttrain/report?part=body", body, signal);
        const figures = [["iteration p50", found.iteration_s.p50, "s"], ["tokens a second and GPU", found.tokens_per_s_per_gpu.p50, "count"]];
        for (const phase of found.phases) figures.push([phase.name, phase.seconds, "s"]);
        return { path: "/v1/posttrain", body, found, shown: [reported(report)], figures };
      },
    },
    chips: {
      ...plain("chips"),
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/compare/chips", body, signal);
        const figures = found.rows.flatMap((row) => [[`${chipName(row)}: tokens a second and GPU`, row.tokens_per_s_per_gpu, "count"], [`${chipName(row)}: joules a token`, row.joules, "count"], [`${chipName(row)}: price of a million tokens`, row.price, "count"]]).filter(([, value]) => value !== null);
        return { path: "/v1/compare/chips", body, found, shown: [chipCards(found), chipBars(found), chipTable(found)], figures };
      },
    },
    serving: {
      ...plain("serving"),
      async answer(values, signal) {
        const body = this.body(values);
        const found = await call("/v1/serving", body, signal);
        const figures = [["requests served a second", found.requests_per_s, "count"], ["requests a second that had what users expect", found.goodput, "count"], ["output tokens a second and GPU", found.output_tokens_per_s_per_gpu, "count"], ["KV memory at its peak", found.kv_peak, "share"]];
        for (const [name, words] of [["ttft_ms", "first token (TTFT)"], ["tpot_ms", "next tokens (TPOT)"], ["e2e_ms", "whole answer"]]) for (const part of ["p50", "p90", "p99"]) figures.push([`${words}, ${part}`, found[name][part], "ms"]);
        return { path: "/v1/serving", body, found, shown: [servingCards(found), cdf(found, values)], figures };
      },
    },
    search: {
      ...plain("search"),
      async answer(values, signal) {
        const body = this.body(values);
        const found = await streamed("/v1/search", body, signal);
        if (!found.best.length) throw new Error(found.notes[0]);
        const best = found.best[0];
        return { path: "/v1/search", body, found, shown: [searchCards(found), pareto(found, values), bestTable(found)], figures: [["step time", best.step_time_s, "s"], ["peak memory", best.peak_gib, "gib"], ["tokens a second and GPU", best.tokens_per_s_per_gpu, "count"]] };
      },
    },
    ways: {
      ...plain("ways"),
      async answer(values, signal) {
        const body = this.body(values);
        const found = await streamed("/v1/search/serving", body, signal);
        if (!found.best.length) throw new Error(found.notes[0]);
        const best = found.best[0];
        return { path: "/v1/search/serving", body, found, shown: [waysCards(found), waysFront(found, values), waysTable(found)], figures: [["output tokens a second and GPU", best.tokens_per_s_per_gpu, "count"], ["tokens a second and user", best.tokens_per_s_per_user, "count"], ["first token (TTFT)", best.ttft_ms, "ms"], ["next tokens (TPOT)", best.tpot_ms, "ms"]] };
      },
    },
    fabric: {
      ...plain("fabric"),
      async form(form, asked) {
        const collectives = (await known("ops")).filter((op) => op.family === "collective" && op.dims.some((dim) => dim.name === "ranks"));
        const { fields } = await opFields(asked, collectives, { kind: "all_reduce", size_bytes: 67108864, ranks: 16 });
        await filled(form, FORMS.fabric, asked, [await specFieldset("Collective", fields)]);
        form.elements.namedItem("op.kind").addEventListener("change", (event) => go("fabric", { ...textsOf(form), "op.kind": event.target.value }, false));
      },
      body: (values) => ({ ...nested(values), network: values.network || "flow" }),
      async answer(values, signal) {
        const body = this.body(values);
        const [found, report] = await Promise.all([call("/v1/predict", body, signal), call("/v1/predict/report?part=body", body, signal)]);
        return { path: "/v1/predict", body, found, shown: [reported(report)], figures: [["latency", found.latency_us, "us"], ["bus bandwidth", found.network.busbw_gbps, "gbps"]] };
      },
    },
    compare: {
      title: "Two answers side by side",
      lead: "Pin answers on the other pages with “Pin to compare”; here they stand beside each other.",
      alone: true,
      async form(form) { form.hidden = true; },
      async answer() { return { shown: [comparison()] }; },
    },
    known: {
      title: "What answers, and how well",
      lead: "The predictors of a device that are loaded: kind of operator, backend, and median error on shapes that none was trained on.",
      alone: true,
      async form(form) {
        const rows = await known("predictors");
        const devices = [...new Set(rows.map((row) => row.device))];
        form.append(await specFieldset("", [{ name: "device", label: "device", kind: "text", choices: devices, strict: true, required: true, usual: devices.includes("h100_sxm") ? "h100_sxm" : devices[0], of: [] }]));
        form.elements.device.addEventListener("change", () => go("known", valuesOf(form)));
      },
      async answer(values) {
        const rows = (await known("predictors")).filter((row) => row.current && row.device === values.device);
        return { shown: [table(`Predictors of ${values.device}`, ["kind", "backend", "version", "rows", "median APE %"], rows)] };
      },
    },
  };
