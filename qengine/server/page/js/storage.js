// What the browser keeps for the page, as JSON under names that begin with "qengine.".

const PREFIX = "qengine.";

/** The value kept under a name, or `otherwise` where there is none or it cannot be read. */
export function load(name, otherwise = null, area = "localStorage") {
  try {
    const text = window[area].getItem(PREFIX + name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/** Keep a value; false where the browser refuses (storage full or switched off). */
export function save(name, value, area = "localStorage") {
  try {
    window[area].setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Forget a value. */
export function forget(name, area = "localStorage") {
  try {
    window[area].removeItem(PREFIX + name);
  } catch {
    // storage is switched off: nothing was kept
  }
}

/** The names kept that begin with `start`. */
export function names(start) {
  try {
    const all = Object.keys(window.localStorage);
    return all.filter((key) => key.startsWith(PREFIX + start)).map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

/** Call back with a name when another tab changes what is kept under it. */
export function onChange(callback) {
  window.addEventListener("storage", (event) => {
    if (event.key?.startsWith(PREFIX)) callback(event.key.slice(PREFIX.length));
  });
}
