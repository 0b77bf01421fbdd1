// A classic script in the head: it sets the theme before anything is drawn. Light, dark, or "auto", the system's.
(() => {
  const KEY = "qengine.theme";
  const read = () => {
    try {
      return localStorage.getItem(KEY) ?? "auto";
    } catch {
      return "auto"; // storage is switched off in this browser
    }
  };
  const apply = (choice) => {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
  };
  window.qengineTheme = {
    choice: read(),
    set(choice) {
      this.choice = choice;
      apply(choice);
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // kept until the page is left
      }
    },
  };
  apply(window.qengineTheme.choice);
})();
