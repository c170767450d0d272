  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const lists = new Map(); // name -> promise of its rows
  const FORMS = Object.fromEntries(JSON.parse($("forms").textContent).map((form) => [form.id, form]));
  let redraw = () => {}; // the charts of the report that is shown, in the theme's colours

  // --- small helpers ------------------------------------------------------------------------------------

  // An element: make("p", {class: "note"}, "text", child …)
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "path", "line", "circle", "rect", "text", "title", "g"].includes(tag);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }
  function seconds(us) {
    if (us === null || us === undefined) return "–";
    const [unit, size] = us >= 1e6 ? ["s", 1e6] : us >= 1e3 ? ["ms", 1e3] : ["µs", 1];
    return `${Number((us / size).toPrecision(4))} ${unit}`;
  }
  const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
  const rounded = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : String(value ?? "–"));

  // --- theme ----------------------------------------------------------------------------------------------

  function stored(area, name, value) {
    try {
      if (value === undefined) return area.getItem(name);
      area.setItem(name, value);
    } catch { /* storage may be forbidden */ }
    return null;
  }
  const theme = stored(localStorage, "opcast-theme");
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  $("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored(localStorage, "opcast-theme", root.dataset.theme);
    redraw();
  });

  const DTYPES = JSON.parse($("forms").dataset.dtypes);

  // --- calls ----------------------------------------------------------------------------------------------

  async function call(path, body, signal) {
    const headers = {};
    const token = stored(sessionStorage, "opcast-token");
    if (token) headers.Authorization = `Bearer ${token}`;
    if (body) headers["Content-Type"] = "application/json";
    const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    if (response.status === 401) {
      $("token-form").hidden = false;
      $("token").focus();
    }
    if (!response.ok) {
      let said = `${response.status} ${response.statusText}`;
      try { said = (await response.json()).error.message; } catch { /* not ours */ }
      throw new Error(said);
    }
    return (response.headers.get("content-type") || "").startsWith("text/html") ? response.text() : response.json();
  }
  // A stream of server-sent events: its progress goes to the status line, its answer is the result.
  async function streamed(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    const token = stored(sessionStorage, "opcast-token");
    if (token) headers.Authorization = `Bearer ${token}`;
    const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the service ended the stream before its answer");
      text += value;
      for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
        const [kind, data] = text.slice(0, end).split("\n").map((line) => line.slice(line.indexOf(" ") + 1));
        const held = JSON.parse(data);
        if (kind === "answer") return held;
        if (kind === "error") throw new Error(held.message);
        progressed(held);
      }
    }
  }
  function known(name) {
    if (!lists.has(name)) {
      const asked = call(`/v1/${name}`).then((found) => found[name]);
      asked.catch(() => lists.delete(name));
      lists.set(name, asked);
    }
    return lists.get(name);
  }
  $("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    stored(sessionStorage, "opcast-token", $("token").value);
    $("token-form").hidden = true;
    show();
  });

