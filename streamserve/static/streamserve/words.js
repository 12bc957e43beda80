// The page's texts. They are written in English where they are used; the server sends the translations of the page's
// language (`WORDS` of web/chat_page.py lists the texts). Pure, but for the one catalogue of the page.

let catalogue = {};
let language;

/** Use these translations, `{English text: text}`, and the page's language for numbers. */
export function useWords(translations, languageCode) {
  catalogue = translations;
  language = languageCode || undefined;
}

/** The page's language, for dates; undefined for the browser's. */
export function pageLanguage() {
  return language;
}

/** Return the text in the page's language, with each `{name}` replaced by its value. */
export function words(text, values = {}) {
  return (catalogue[text] ?? text).replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
}

export function count(number) {
  return number.toLocaleString(language);
}

/** A number with so many digits behind the point, or the comma. */
export function decimal(number, digits) {
  return number.toLocaleString(language, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
