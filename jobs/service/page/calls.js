(() => {
  "use strict";
  const root = document.documentElement;
  const kept = (area, name, value) => { try { if (value === undefined) return area.getItem(name); area.setItem(name, value); } catch { /* storage may be forbidden */ } return null; };
  const theme = kept(localStorage, "opcast-theme");
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    kept(localStorage, "opcast-theme", root.dataset.theme);
  });
  document.getElementById("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    kept(sessionStorage, "opcast-token", document.getElementById("token").value);
  });
  const LONGEST = 20000; // letters of an answer that are shown
  for (const form of document.querySelectorAll("form.try")) {
    form.closest("details").addEventListener("toggle", () => { form.hidden = false; });
    const body = form.querySelector("textarea");
    if (body) body.value = JSON.stringify(JSON.parse(body.value), null, 1);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const shown = form.querySelector("pre");
      shown.hidden = false;
      shown.textContent = "Asking …";
      const headers = body ? { "Content-Type": "application/json" } : {};
      const token = kept(sessionStorage, "opcast-token");
      if (token) headers.Authorization = `Bearer ${token}`;
      const path = form.dataset.path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(form.elements[name].value));
      try {
        const response = await fetch(path, { method: form.dataset.method, headers, body: body ? body.value : undefined });
        const text = await response.text();
        const json = (response.headers.get("content-type") || "").includes("application/json");
        const said = json ? JSON.stringify(JSON.parse(text), null, 1) : text;
        shown.textContent = `${response.status} ${response.statusText}\n${said.slice(0, LONGEST)}${said.length > LONGEST ? "\n…" : ""}`;
      } catch (error) {
        shown.textContent = error.message;
      }
    });
  }
})();
