// The excerpts of search results, without the glossary cards of the page.
if (typeof Search !== "undefined") {
  const toText = Search.htmlToText;
  Search.htmlToText = (html, anchor) => toText(html.replace(/<span role="tooltip".*?<\/span>/gs, ""), anchor);
}
