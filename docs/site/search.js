// Ranks what the search finds: guides before the reference, pages for contributors last.
var Scorer = {
  score: ([page, , , , score]) => {
    if (page === "guide/troubleshooting") return score + 4; // a part of an error's text
    if (page.startsWith("guide/recipes/")) return score + 1;
    if (page.startsWith("guide/")) return score + 3;
    return /^(decisions\/|architecture|store-keys|CHANGELOG|incidents)/.test(page) ? score - 4 : score;
  },
  // as in Sphinx
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
