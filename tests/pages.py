"""Scans and reports to make pages of, and what a page has in it."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from html.parser import HTMLParser
from typing import Any

from precconv.checks import Finding
from precconv.dtypes import BF16, FP16, FP32, TARGETS
from precconv.exponents import Exponents
from precconv.html import page
from precconv.measures import Dyadic, Loss, Measure
from precconv.plan import Item, Plan
from precconv.report import Report
from precconv.scan import Scan, TensorScan
from precconv.stats import Norms, Stats
from precconv.tensors import TensorInfo

__all__ = ["HOSTILE", "Page", "data_of", "expert_names", "large_page", "report_of", "scan_of", "tensor_rows"]

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "'\"><b onclick=alert(1)>",
    "--><!-- <![CDATA[",
    "a\u202egnp.exe\u2066b\u200bc\u2028d\u2029e",
    "${alert(1)}`@data@@script@",
    "&lt;b&gt;&amp;",
    "javascript:alert(1)",
    "__proto__.constructor.toString",
    "\x00\x1b[31m\x7f",
    "name." * 200_000,
)


def expert_names(n: int) -> list[str]:
    """Names as a mixture of experts has them, 61 layers of them."""
    parts = [f"mlp.experts.{e}.{p}_proj.weight" for e in range(-(-n // 183)) for p in ("gate", "up", "down")]
    names = [f"model.layers.{layer}.{part}" for layer in range(61) for part in parts]
    return names[:n]


def measured(rng: random.Random, numel: int) -> Measure:
    """As of normally distributed values, some of them too large for FP16."""
    top = rng.choice([-3, -4, -5, 16 if rng.random() < 0.001 else -6])
    counts, left = [], numel
    while left > 1:
        left, part = divmod(left, 2)
        noise = rng.randrange(left // 8 + 1)
        counts.append(left + part + noise)
        left -= noise
    losses = {
        FP16: Loss(max(0, top - 15), rng.randrange(3), rng.randrange(9000), False, rng.random() * 2.0**-13,
                   Dyadic(rng.randrange(1, 1 << 40) | 1, -30), Dyadic(rng.randrange(1, 1 << 40) | 1, -53)),
        BF16: Loss(0, 0, 0, False, rng.random() * 2.0**-9,
                   Dyadic(rng.randrange(1, 1 << 40) | 1, -30), Dyadic(rng.randrange(1, 1 << 40) | 1, -46)),
    }  # fmt: skip
    smallest, largest = rng.random() * 2.0**-30, rng.uniform(1, 2) * 2.0**top
    rest = tuple(losses.get(to, Loss()) for to in TARGETS)
    return Measure(
        numel, 0, 0, rng.randrange(5), 0, smallest, largest, Exponents(top - len(counts) + 1, tuple(counts[::-1])), rest
    )


def scan_of(names: Sequence[str], *, shape: tuple[int, ...] = (2048, 7168), source: str = "model.safetensors") -> Scan:
    """A scan of tensors with these names and made-up values, without a file of that size."""
    rng = random.Random(0)
    tensors = []
    for name in names:
        info = TensorInfo(name, FP32, shape, 0, 4 * shape[0] * shape[1])
        items = {to: Item(info, to, "target") for to in (FP16, BF16)}
        tensors.append(TensorScan("model.safetensors", info, measured(rng, shape[0] * shape[1]), items))
    return Scan(source, (FP16, BF16), tuple(tensors), ("a note",), (), 1.5)


def report_of(names: Sequence[str]) -> Report:
    """A conversion to FP16 of the same tensors; those that overflow became FP32."""
    items, seen, findings = [], {}, []
    for n, tensor in enumerate(scan_of(names).tensors):
        assert tensor.measure is not None
        found, loss = tensor.measure, tensor.measure.loss(FP16)
        norms = Norms(found.max_abs, loss.max_abs_error, 1.0, loss.relative_rms_error**2)
        items.append(
            Item(tensor.info, FP32 if loss.overflow else FP16, "overflow in fp16" if loss.overflow else "target")
        )
        seen[n] = Stats(found.n, zero=found.zero, subnormal=loss.subnormal, norms=norms, exponents=found.exponents)
        if loss.overflow:
            findings.append(Finding("overflow", "warning", tensor.name, "does not fit fp16; fp32 instead"))
    return Report(
        source="model.safetensors",
        output="model.fp16.safetensors",
        plan=Plan(FP16, tuple(items), (), {}),
        seen=seen,
        findings=tuple(findings),
        options={},
        source_bytes=4 * sum(i.src.numel for i in items),
        output_bytes=sum(i.nbytes for i in items),
        verified_bytes=0,
        seconds=1.5,
    )


@cache
def large_page(kind: str = "scan") -> str:
    """Of 100,000 tensors of a mixture of experts."""
    names = expert_names(100_000)
    return page(scan_of(names) if kind == "scan" else report_of(names))


class Page(HTMLParser):
    """A page's elements with their attributes, and the text in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002  the parser's own signature
        self.open = ""

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open, data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def inside(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def data_of(text: str) -> Any:
    """What the page's script unpacks."""
    (data,) = [data for data in Page(text).inside("script") if "\n" not in data]
    return json.loads(zlib.decompress(base64.b64decode(data, validate=True)))


def tensor_rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Columns as rows again; what no value stands for is left out."""
    plain = {key: tensor_rows(c) if isinstance(c, dict) and "at" not in c else _values(c) for key, c in columns.items()}
    count = max(map(len, plain.values()), default=0)
    rows = [{key: values[i] for key, values in plain.items()} for i in range(count)]
    return [{k: v for k, v in row.items() if v is not None and v != {}} for row in rows]


def _values(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    return [None if i is None else column["table"][i] for i in column["at"]]
