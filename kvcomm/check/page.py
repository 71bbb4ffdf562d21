"""The report as one HTML page, without scripts or anything from elsewhere."""

from __future__ import annotations

from html import escape

from kvcomm.check.plot import as_svg
from kvcomm.check.report import HEADINGS, Report, rows_of

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:50em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}.yes{color:#070}.no{color:#b00}"
)


def page(report: Report) -> str:
    """The whole page."""
    verdict = "yes" if report.ok else "no"
    answer = "Reuse keeps the bound" if report.ok else "Reuse does not keep the bound"
    if not report.supported:
        answer = "This model is not supported"
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows_of(report))
    kinds = "".join(f"<tr><td>{escape(kind)}</td><td>{kl:.4f}</td></tr>" for kind, kl in report.by_kind.items())
    measured = (
        f"<h2>Closeness to a full prefill</h2><table><tr>{head}</tr>{body}</table>"
        f"<h2>By kind of text, {escape(report.policy)}</h2><table><tr><th>kind</th><th>mean KL</th></tr>{kinds}</table>"
        f"<h2>Predicted before the first token, against measured</h2>{as_svg(report.points, report.max_kl)}"
        if report.supported
        else ""
    )
    calibrated = "calibrated for this model" if report.calibrated else "not calibrated for this model: cautious"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>kvcomm check</title>'
        f"<style>{_STYLE}</style><h1>{escape(report.model)}</h1>"
        f'<p class="{verdict}"><strong>{answer}.</strong> {escape(report.reason)}</p>'
        f"<p>Recommended: <code>{escape(report.policy)}</code>. {report.prompts} prompts; predictions {calibrated}.</p>"
        f"{measured}</html>\n"
    )
