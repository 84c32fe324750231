# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""Interactive figures of attention maps, as Plotly draws them."""

import html
import json
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from diffllama.explorer.maps import HeadMaps


SIGNED = "RdBu_r"
"""Colours of maps: blue below zero, white at zero, red above."""

LAYOUT = {
    "template": "plotly_white",
    "margin": {"l": 60, "r": 20, "t": 80, "b": 60},
    "title": {"x": 0.02, "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 36}, "font": {"size": 14}},
}
"""Layout of every figure. The title is below Plotly's buttons."""

PARTS = {"answer": "#D55E00", "noise": "#56B4E9", "other": "#999999"}
"""Parts of a prompt, and their colours."""


def labels(tokens: Sequence[str]) -> list[str]:
    """Return a label for each token, its number and its text, as Plotly shows it literally."""
    return [f"{at} {html.escape(token.replace(chr(10), '⏎'))}" for at, token in enumerate(tokens)]


def overview(cancelled: Sequence[Sequence[float]], name: str) -> go.Figure:
    """Draw how much of its first map each head's second map cancels, by layer and head."""
    heat = go.Heatmap(
        z=cancelled,
        zmin=0,
        zmax=1,
        colorscale="Cividis",
        colorbar={"title": {"text": "share"}},
        hovertemplate="layer %{y}, head %{x}: %{z:.3f}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    figure = go.Figure(heat, LAYOUT)
    figure.update_layout(title_text=f"{html.escape(name)}: share of the first map that λ·A₂ cancels", height=420)
    figure.update_xaxes(title="head", dtick=1, constrain="domain")
    figure.update_yaxes(title="layer", dtick=1, autorange="reversed")
    return figure


def maps(head: HeadMaps, tokens: Sequence[str]) -> list[go.Figure]:
    """Draw A1, λ·A2 and A1 - λ·A2 of a head with one scale, whose middle is zero; the one map of a Transformer."""
    if head.second is None or head.weight is None:
        drawn = {"attention map A (softmax)": head.first}
    else:
        low, high = head.weight.min().item(), head.weight.max().item()
        weight = f"λ = {low:.3f}" if high - low < 5e-4 else f"λ = {low:.3f} to {high:.3f}"
        drawn = {
            "first map A₁ (softmax)": head.first,
            f"second map λ·A₂ (λ times softmax), {weight}": head.second,
            "difference A₁ − λ·A₂ (signed)": head.first - head.second,
        }
    largest = max(values.abs().max().item() for values in drawn.values())
    names = labels(tokens)
    figures = []
    for title, values in drawn.items():
        heat = go.Heatmap(
            x=names,
            y=names,
            z=values.numpy(),
            zmin=-largest,
            zmax=largest,
            colorscale=SIGNED,
            colorbar={"title": {"text": "weight"}, "thickness": 12},
            hovertemplate="“%{y}” attends to “%{x}”: %{z:.6f}<extra></extra>",
        )
        figure = go.Figure(heat, LAYOUT)
        figure.update_layout(title_text=title, height=440)
        figure.update_xaxes(title="attended token", type="category", tickangle=-90, tickfont={"size": 9}, nticks=40)
        figure.update_yaxes(
            title="token that attends", type="category", autorange="reversed", tickfont={"size": 9}, nticks=40
        )
        figures.append(figure)
    return figures


def bars(shares: Mapping[str, Sequence[Sequence[float]]], kind: str) -> list[go.Figure]:
    """Draw what the last token gives to the answer, to noise and to the rest in each layer, a figure for each model.

    Args:
        shares: model -> the three parts, by layer.
        kind: `signed` or `absolute`.
    """
    low = min(0.0, *(value for parts in shares.values() for part in parts for value in part))
    figures = []
    for name, parts in shares.items():
        figure = go.Figure(layout=LAYOUT)
        for (part, colour), values in zip(PARTS.items(), parts, strict=True):
            hover = f"layer %{{x}}, {part}: %{{y:.4f}}<extra></extra>"
            figure.add_bar(x=list(range(len(values))), y=values, name=part, marker_color=colour, hovertemplate=hover)
        figure.update_layout(
            title_text=html.escape(name), barmode="group", height=380, legend={"orientation": "h", "y": 1.1}
        )
        figure.update_xaxes(title="layer", dtick=1)
        figure.update_yaxes(title=f"{kind} share of attention", range=[low * 1.05, 1.0])
        figures.append(figure)
    return figures


def as_value(figures: Sequence[go.Figure], file: str) -> str:
    """Return figures as JSON for the page, with the name of downloaded files without ending."""
    return f'{{"file": {json.dumps(file)}, "figures": [{", ".join(figure.to_json() for figure in figures)}]}}'
