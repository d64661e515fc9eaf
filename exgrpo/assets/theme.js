// The switch between light and dark. Without a choice, a page follows the system.
"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function kept(choice) {
    // A page from a file may be refused a storage.
    try {
      if (choice) localStorage.setItem("theme", choice);
      return localStorage.getItem("theme");
    } catch {
      return choice;
    }
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  }

  function show() {
    button.textContent = isDark() ? "light" : "dark";
    button.setAttribute("aria-label", `${button.textContent} mode`);
    document.dispatchEvent(new Event("theme"));
  }

  const choice = kept();
  if (choice === "dark" || choice === "light") root.dataset.theme = choice;
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = kept(isDark() ? "light" : "dark");
    show();
  });
  dark.addEventListener("change", show);
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    show();
  });
  addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    show();
  });
  show();
})();
