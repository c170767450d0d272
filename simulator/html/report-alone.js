// A report in a file of its own: its theme, and Plotly out of the file.
(() => {
  "use strict";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // What the address says (#dark), else what was chosen before, else what the system prefers.
  function remembered() {
    try { return localStorage.getItem("opcast-theme"); } catch { return null; }
  }
  function remember(theme) {
    try { localStorage.setItem("opcast-theme", theme); } catch { /* a page opened from a file may not store */ }
  }
  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }
  const asked = ["dark", "light"].find((theme) => location.hash === "#" + theme) || remembered();
  if (asked === "dark" || asked === "light") root.dataset.theme = asked;

  // Plotly lies in the file as gzip in base64: a quarter of its size.
  async function unpacked() {
    const packed = document.getElementById("plotly");
    if (!packed) return null;
    const bytes = Uint8Array.from(atob(packed.textContent.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    return window.Plotly;
  }
  const redraw = opcastReport(document, unpacked());
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    redraw();
  });
  dark.addEventListener("change", redraw);
})();
