# Copyright 2026 The diffllama authors.
# SPDX-License-Identifier: Apache-2.0
"""The explorer's page: chat, attention maps, and attention to an answer.

The link to a view has its settings in the fragment (`#view=maps&text=…`), which browsers do not send to servers. The
server keeps nothing of a visitor: each request brings all that it needs.
"""

import html
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import gradio as gr
from gradio.components import Component

from diffllama.evaluation.models import LoadedModel
from diffllama.explorer import chat, figures, needle
from diffllama.explorer.maps import LIMIT, MapReader


TITLE = "diffllama explorer"

FOLDER = Path(__file__).parent

PLOTLY = "plotly.min.js"
"""Path of Plotly's script on the server."""

CSS = """
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 8px; }
.plots > div { min-width: 0; }
footer { display: none !important; }
"""

LAST: dict[str, Any] = {"trigger_mode": "always_last", "api_name": False}
"""Options of event listeners: what a visitor does meanwhile is not lost, its last occurrence follows."""

EXAMPLE = "The evening was still, and the old man walked home by the old road, for the evening was still."


@contextmanager
def shown() -> Iterator[None]:
    """Show the message of an error that the visitor can mend on the page."""
    try:
        yield
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error


def plots(elem_id: str) -> gr.HTML:
    """Return a row of Plotly figures, below each other where the page is narrow. `figures.as_value` makes its value."""
    return gr.HTML(
        "",
        html_template="<div class='plots'></div>",
        js_on_load=(FOLDER / "plots.js").read_text(encoding="utf-8"),
        head=f"<script src='{PLOTLY}'></script>",
        elem_id=elem_id,
    )


@dataclass(frozen=True)
class View:
    """A tab of the page.

    Args:
        name: its identifier in links.
        settings: name in links -> component.
        link: shows the link.
        draw: functions of the settings, and the figures that they draw.
    """

    name: str
    settings: dict[str, Component]
    link: gr.Textbox
    draw: tuple[tuple[Callable[..., str], gr.HTML], ...] = ()

    @property
    def show_link(self) -> dict[str, Any]:
        """Arguments of an event listener that shows the link to the view with its settings, also as the address."""
        names = json.dumps(list(self.settings))
        js = f"""(...values) => {{
            const settings = {names}.map((name, at) => [name, values[at] ?? ""]);
            history.replaceState(null, "", "#" + new URLSearchParams([["view", "{self.name}"], ...settings]));
            return location.href;
        }}"""
        return {"fn": None, "inputs": list(self.settings.values()), "outputs": self.link, "js": js, "api_name": False}

    def restored(self, given: dict[str, str]) -> dict[Component, Any]:
        """Return the values of the components that a link gives. Values that a component cannot have are left out."""
        values: dict[Component, Any] = {}
        for name, component in self.settings.items():
            value: Any = given.get(name)
            if isinstance(component, gr.Number | gr.Slider):
                try:
                    value = min(max(float(value), component.minimum), component.maximum)
                except (TypeError, ValueError):
                    continue
            elif isinstance(component, gr.Radio) and value not in [choice for _, choice in component.choices]:
                continue
            if value is not None:
                values[component] = value
        return values


def link_box(view: str) -> gr.Textbox:
    """Return the box for the link to a view."""
    return gr.Textbox(label="Link to this view", interactive=False, buttons=["copy"], elem_id=f"{view}-link")


def describe(model: LoadedModel) -> str:
    """Describe a model in a line of text."""
    facts = model.facts()
    variant = f"DIFF {facts['variant'].upper()}" if facts["variant"] else facts["model_type"]
    return f"{model.name}: {variant}, {facts['parameters']:,} parameters, {facts['dtype']}"


def as_shown(conversation: chat.Messages) -> list[dict[str, str]]:
    """Return a conversation as the page takes it, which reads HTML."""
    return [message | {"content": html.escape(message["content"], quote=False)} for message in conversation]


def as_written(shown: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the role and the text of each message of a conversation from the page."""
    texts = [
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        for content in (message["content"] for message in shown)
    ]
    return [
        {"role": message["role"], "content": html.unescape(text)} for message, text in zip(shown, texts, strict=True)
    ]


class Explorer:
    """The page of a model and, if there is one, of its baseline.

    Args:
        models: the models, whose names differ.
    """

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self.models = list(models)
        self.readers = {model.name: MapReader(model) for model in models}

    def respond(
        self, message: str, temperature: float, max_tokens: float, *histories: Sequence[dict[str, Any]]
    ) -> Iterator[list[Any]]:
        """Answer a message with each model, one after the other, so that they do not slow each other down.

        Yields:
            The message box, emptied, then each model's conversation, then the speed of each model's answer.
        """
        tokens = int(max_tokens)
        conversations = [[*as_written(history), {"role": "user", "content": message}] for history in histories]
        speeds = ["" for _ in self.models]
        with shown():
            if not message.strip():
                raise ValueError("The message is empty. Write one.")
            for model, conversation in zip(self.models, conversations, strict=True):
                chat.prompt(model, conversation)
            for at, model in enumerate(self.models):
                asked = conversations[at]
                for answer in chat.answer(model, asked, temperature, tokens):
                    conversations[at] = [*asked, {"role": "assistant", "content": answer.text}]
                    speeds[at] = str(answer)
                    yield ["", *map(as_shown, conversations), *speeds]

    def overview(self, text: str, name: str, *_: Any) -> str:
        """Draw how much each head cancels in a text."""
        with shown():
            reader = self.readers[name]
            return figures.as_value([figures.overview(reader.cancelled(reader.encode(text)), name)], "overview")

    def head(self, text: str, name: str, layer: float, head: float) -> str:
        """Draw the maps of a head."""
        with shown():
            reader = self.readers[name]
            ids = reader.encode(text)
            drawn = figures.maps(reader.head(ids, int(layer), int(head)), reader.tokens(ids))
            return figures.as_value(drawn, f"layer_{int(layer)}_head_{int(head)}")

    def needle(self, before: str, text: str, question: str, kind: str) -> str:
        """Draw the attention to an answer and to the rest of a prompt, for each model."""
        with shown():
            asked = needle.Question(before, text, question)
            shares = {name: reader.shares(asked.passage(reader.loaded))[kind] for name, reader in self.readers.items()}
            return figures.as_value(figures.bars(shares, kind), "needle")

    def chat_view(self) -> View:
        """Build the tab of the conversation."""
        with gr.Row():
            columns = []
            for at, model in enumerate(self.models):
                with gr.Column(min_width=320):
                    box = gr.Chatbot(  # shown as text: Markdown could load pictures from elsewhere
                        label=model.name, render_markdown=False, buttons=["copy"], height=320, elem_id=f"chat-{at}"
                    )
                    columns.append((box, gr.HTML(elem_id=f"speed-{at}")))
        chats, speeds = map(list, zip(*columns, strict=True))
        message = gr.Textbox(label="Message", lines=2, elem_id="message")
        with gr.Row():
            send = gr.Button("Send", variant="primary", elem_id="send")
            stop = gr.Button("Stop", elem_id="stop")
            new = gr.Button("New conversation")
        with gr.Accordion("Settings", open=False):
            temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature (0: the likeliest tokens)")
            max_tokens = gr.Slider(1, 1024, 256, step=1, label="Most tokens of an answer", elem_id="max-tokens")
        settings = {"message": message, "temperature": temperature, "tokens": max_tokens}
        view = View("chat", settings, link_box("chat"))
        running = gr.on([send.click, message.submit], **view.show_link).then(
            self.respond, [*settings.values(), *chats], [message, *chats, *speeds], api_name=False
        )
        stop.click(None, cancels=[running], api_name=False)
        new.click(
            lambda: [[] for _ in chats] + ["" for _ in speeds],
            None,
            [*chats, *speeds],
            cancels=[running],
            api_name=False,
        )
        return view

    def maps_view(self) -> View:
        """Build the tab of the maps."""
        gr.Markdown(
            f"The second map of a differential head, times λ, is subtracted from the first. Click a cell to see its "
            f"maps. Texts may have up to {LIMIT} tokens."
        )
        text = gr.Textbox(EXAMPLE, label="Text", lines=3, elem_id="maps-text")
        names = list(self.readers)
        with gr.Row():
            model = gr.Radio(names, value=names[0], label="Model", visible=len(names) > 1)
            layer = gr.Number(0, label="Layer", precision=0, minimum=0, maximum=9999, elem_id="layer")
            head = gr.Number(0, label="Head", precision=0, minimum=0, maximum=9999, elem_id="head")
            show = gr.Button("Show maps", variant="primary", elem_id="show-maps")
        overview, heads = plots("overview"), plots("heads")
        settings = {"text": text, "model": model, "layer": layer, "head": head}
        view = View("maps", settings, link_box("maps"))
        inputs = list(settings.values())
        draw_head = {"fn": self.head, "inputs": inputs, "outputs": heads, "api_name": False}
        drawn = [
            gr.on([show.click, model.change], self.overview, inputs, overview, **LAST).success(**draw_head),
            overview.click(self.clicked, None, [layer, head], **LAST).success(**draw_head),
            gr.on([layer.submit, head.submit], **draw_head | LAST),
        ]
        for event in drawn:
            event.success(**view.show_link)
        return replace(view, draw=((self.overview, overview), (self.head, heads)))

    @staticmethod
    def clicked(event: gr.EventData) -> tuple[int, int]:
        """Return the layer and the head of a cell."""
        return int(event.y), int(event.x)

    def needle_view(self) -> View:
        """Build the tab of the attention to an answer."""
        gr.Markdown(
            "Mark the answer in the text as [[answer]]. The bars show what the prompt's last token, which predicts the "
            "answer's first, gives to the answer, to the rest of the text (noise), and to the rest of the prompt."
        )
        example = needle.example(self.models[0])
        before = gr.Textbox(example.before, label="Before the text")
        text = gr.Textbox(example.text, label="Text", lines=6, max_lines=12, elem_id="needle-text")
        question = gr.Textbox(example.question, label="Question, and the beginning of its answer", lines=3)
        kind = gr.Radio(
            ["signed", "absolute"],
            value="signed",
            label="Shares: signed sums, or sums of absolute values, of the layer's sum of absolute values",
        )
        measure = gr.Button("Measure", variant="primary", elem_id="measure")
        bars = plots("bars")
        settings = {"before": before, "text": text, "question": question, "kind": kind}
        view = View("needle", settings, link_box("needle"))
        gr.on([measure.click, kind.change], self.needle, list(settings.values()), bars, **LAST).success(
            **view.show_link
        )
        return replace(view, draw=((self.needle, bars),))

    def page(self) -> gr.Blocks:
        """Build the page."""
        with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True) as page:
            gr.Markdown(f"# {TITLE}")
            gr.HTML("<br>".join(html.escape(describe(model)) for model in self.models))
            with gr.Tabs() as tabs:
                with gr.Tab("Chat", id="chat"):
                    chat_view = self.chat_view()
                with gr.Tab("Maps", id="maps"):
                    maps_view = self.maps_view()
                with gr.Tab("Needle", id="needle"):
                    needle_view = self.needle_view()
            views = {view.name: view for view in (chat_view, maps_view, needle_view)}
            opened = gr.Textbox(visible=False)  # name of the view that the page's address names

            def restore(fragment: str) -> dict[Component | gr.Tabs, Any]:
                given = {
                    name: values[0]
                    for name, values in parse_qs(fragment.removeprefix("#"), keep_blank_values=True).items()
                }
                name = given.get("view", "")
                if name not in views:
                    return {opened: ""}
                return {opened: name, tabs: gr.Tabs(selected=name), **views[name].restored(given)}

            components = [component for view in views.values() for component in view.settings.values()]
            restored = page.load(restore, opened, [opened, tabs, *components], js="() => location.hash", api_name=False)
            boxes = {view.name: view.link for view in views.values()}
            js = f"""name => {{
                document.documentElement.dataset.view = name;  // the page is ready
                return {json.dumps(list(boxes))}.map(view => view === name ? location.href : "");
            }}"""
            restored.success(None, opened, list(boxes.values()), js=js, api_name=False)
            for view in views.values():
                for draw, row in view.draw:
                    restored.success(
                        partial(draw_if, view.name, draw), [opened, *view.settings.values()], row, api_name=False
                    )
        return page


def draw_if(view: str, draw: Callable[..., str], opened: str, *settings: Any) -> Any:
    """Draw the figures of a view if the page's address names it."""
    return draw(*settings) if opened == view else gr.skip()
