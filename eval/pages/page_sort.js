for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const down = head.getAttribute("aria-sort") !== "descending", at = [...head.parentNode.children].indexOf(head);
  const key = row => row.children[at].dataset.v ?? "";
  const order = (a, b) => a === "" ? 1 : b === "" ? -1 : isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    return x === "" || y === "" ? order(x, y) : down ? order(y, x) : order(x, y);
  });
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows);
});
