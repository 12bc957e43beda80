// The page's texts. They are written in English where they are used; the server sends the translations of the page's
// language (web/chat_words.py lists the texts). Pure, but for the one catalogue of the page.

let catalogue = {};
let language;

/** Use these translations, `{English text: text}`, and the page's language for numbers. */
export function useWords(translations, languageCode) {
  catalogue = translations;
  language = languageCode || undefined;
}

/** Return the text in the page's language, with each `{name}` replaced by its value. */
export function words(text, values = {}) {
  return (catalogue[text] ?? text).replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
}

export function count(number) {
  return number.toLocaleString(language);
}
