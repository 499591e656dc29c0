"""Markdown on the chat page: what becomes of it, and what of it is rendered again as it grows."""

import pytest

from tests.page.test_chat_page import MARKDOWN
from tests.unit.serve_app.fake_replicas import PretendReplica

pytestmark = pytest.mark.asyncio(loop_scope="package")
RENDER = """async (source) => {
  const { renderMarkdown } = await import("/page/markdown.js");
  const shown = document.createElement("div");
  renderMarkdown(shown, source);
  for (const each of shown.querySelectorAll("[dir]")) each.removeAttribute("dir");
  return shown.innerHTML.replaceAll(' target="_blank" rel="noopener noreferrer"', "");
}"""
LINK = "https://example.org/"
INLINE = {
    "the _id column and the user_id": "the _id column and the user_id",
    "_private and my_var": "_private and my_var",
    "_a b_ c_": "<em>a b</em> c_",
    "***both*** **a*b**": "<em><strong>both</strong></em> <strong>a*b</strong>",
    "*a **b** c* **d *e***": ("<em>a <strong>b</strong> c</em> <strong>d <em>e</em></strong>"),
    "2 * 3 *\n**「foo」**は ~~a *b*~~ ~c~": (
        "2 * 3 *<br><strong>「foo」</strong>は <del>a <em>b</em></del> ~c~"
    ),
    f"see [1] and arr[0], in [the *docs*]({LINK}a)": (
        f'see [1] and arr[0], in <a href="{LINK}a">the <em>docs</em></a>'
    ),
    f"[Foo]({LINK}Foo_(bar)) and ([b]({LINK} 'c (d)'))": (
        f'<a href="{LINK}Foo_(bar)">Foo</a> and (<a href="{LINK}">b</a>)'
    ),
    f"[![a]({LINK}a.png)]({LINK})": f'<a href="{LINK}">a</a>',
    r"\*a\* [b\](c) `*d*` `[`": "*a* [b](c) <code>*d*</code> <code>[</code>",
}
BLOCKS = {
    "Choose A | B | C\n---\ntext": "<p>Choose A | B | C</p><hr><p>text</p>",
    "a\n    b": "<p>a<br>b</p>",
    "- a\n\n  b\n- [ ] c": (
        "<ul><li><span>a</span><p>b</p></li><li><span>"
        '<input type="checkbox" disabled="" aria-label="open"> c</span></li></ul>'
    ),
}
GROWING = f"""{MARKDOWN}
    indented *code*

        more of it
1. a

   ~~~js
   let a = "b\\"c"; /* d
   e */ f(1.5, 'g')
   ~~~
2. h
* i | j
> k **l
> m** ***n***

o | p
:-: | :--
q | [r](https://example.org/s_(t))

```sh
echo "u" # `` v

``
"""


async def test_markdown_becomes_elements(visiting):
    async with visiting(PretendReplica((MARKDOWN,))) as visit:
        await visit.ask("Hi")
        await visit.page.get_by_text("tokens/s").wait_for()
        answer = visit.page.locator("article.assistant .markdown")
        found = {
            "h3": "One", "strong": "three", "em": "four", "p > code": "five", "del": "six",
            "ul ul > li": "b", "blockquote": "f", "th": "g", "td.right code": "a|b",
            ".comment": "# comment", ".string": '"text"', "ol[start='3'] > li": "d",
        }  # fmt: skip
        for selector, text in found.items():
            assert await answer.locator(selector).first.inner_text() == text, selector
        assert "2 * 3 * 4 snake_case_name" in await answer.inner_text()
        assert await answer.locator("input[type=checkbox]").is_checked()


async def test_long_lines_of_markdown_become_elements_at_once(visiting):
    render = """async (source) => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const shown = document.createElement("div");
      renderMarkdown(shown, source);
      return [...shown.children].map((each) => [each.tagName, each.textContent.slice(0, 4)]);
    }"""
    gap = " " * 20_000
    expected = {
        f"# a{gap}b": ["H3", "a   "],
        "## C# ##": ["H4", "C#"],
        "# #": ["H3", ""],
        f"```{gap}`": ["P", "``` "],
        f"|e|\n|-{gap}x|": ["P", "|e||"],
        "|f|g|\n| :-: |-|": ["DIV", "fg"],
        "~~~ python x\nh\n~~~": ["FIGURE", "pyth"],
    }
    async with visiting(PretendReplica()) as visit:
        shown = await visit.page.evaluate(render, "\n\n".join(expected))
        assert shown == [*expected.values()]


async def test_inline_elements_are_what_they_look_like(visiting):
    async with visiting(PretendReplica()) as visit:
        for source, expected in INLINE.items():
            assert await visit.page.evaluate(RENDER, source) == f"<p>{expected}</p>"


async def test_blocks_are_what_they_look_like(visiting):
    code = "int main() {\n    return 0;\n\n}"
    indented = "\n".join(f"    {line}" for line in code.split("\n"))
    async with visiting(PretendReplica()) as visit:
        for source, expected in BLOCKS.items():
            assert await visit.page.evaluate(RENDER, source) == expected
        shown = await visit.page.evaluate(RENDER, f"a\n\n{indented}\n\nb")
        assert f"<code>{code}</code>" in shown


async def test_text_that_grows_looks_like_the_same_text_at_once(visiting):
    compare = """async (source) => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const grown = document.createElement("div");
      for (let length = 0; length <= source.length; length++) {
        const shown = source.slice(0, length);
        renderMarkdown(grown, shown);
        const fresh = document.createElement("div");
        renderMarkdown(fresh, shown);
        if (grown.innerHTML !== fresh.innerHTML) return [shown, grown.innerHTML, fresh.innerHTML];
      }
      return null;
    }"""
    async with visiting(PretendReplica()) as visit:
        assert await visit.page.evaluate(compare, GROWING) is None


async def test_growing_text_keeps_the_nodes_that_are_complete(visiting):
    grow = """async ([before, after, selector]) => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const shown = document.createElement("div");
      renderMarkdown(shown, before);
      const kept = [...shown.querySelectorAll(selector)];
      renderMarkdown(shown, after);
      const now = [...shown.querySelectorAll(selector)];
      return kept.map((each, at) => each === now[at]);
    }"""
    grown = [
        ("- a\n- b\n  - c\n  - d", "e", "li", [True] * 4),
        ("- a\n  > b\n\n- c", "\n- d", "li, blockquote p", [True, True, True]),
        ("|a|b|\n|-|-|\n|c|d|\n|e|", "f|", "table, tr", [True, True, True, False]),
        ("```js\nlet a = 1;\nb", "\n```", "figure, pre, span, button", [True] * 6),
        ("```js\nlet a = 1;\n``", "`\nmore", "figure, pre, span, button", [True] * 6),
    ]
    async with visiting(PretendReplica()) as visit:
        for before, more, selector, kept in grown:
            found = await visit.page.evaluate(grow, [before, before + more, selector])
            assert found == kept, before


async def test_a_selection_in_code_stays_when_the_code_grows(visiting):
    select = """async () => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const shown = document.querySelector("#messages");
      renderMarkdown(shown, "```py\\nalpha = beta + gam");
      const text = shown.querySelector("code").firstChild;
      getSelection().setBaseAndExtent(text, 0, text, 12);
      renderMarkdown(shown, "```py\\nalpha = beta + gamma\\n\\nif x:");
      return [getSelection().toString(), shown.querySelector("code").textContent];
    }"""
    async with visiting(PretendReplica()) as visit:
        selected, code = await visit.page.evaluate(select)
        assert selected == "alpha = beta"
        assert code == "alpha = beta + gamma\n\nif x:"


async def test_the_work_for_a_paragraph_grows_with_its_length(visiting):
    """Counted in parts of texts, of which a search for an end takes one or more."""
    count = """async (source) => {
      const { renderMarkdown } = await import("/page/markdown.js");
      const { slice } = String.prototype;
      let calls = 0;
      String.prototype.slice = function (...range) { calls++; return slice.apply(this, range); };
      renderMarkdown(document.createElement("div"), source);
      String.prototype.slice = slice;
      return calls;
    }"""
    async with visiting(PretendReplica()) as visit:
        for part in ("*a ", "**a ", "_a ", "*a* ", "~~a ", "[a](", "[", "`a ``b "):
            source = part * 1000
            assert await visit.page.evaluate(count, source) < 3 * len(source), part


async def test_drawing_pauses_for_three_times_as_long_as_it_took(visiting):
    run = """async () => {
      const { paced } = await import("/page/pacing.js");
      const [frames, timers, drawn] = [[], [], []];
      let now = 0;
      window.requestAnimationFrame = (frame) => frames.push(frame);
      window.setTimeout = (next, pause) => timers.push([next, pause]);
      performance.now = () => now;
      const draw = paced((text) => { drawn.push(text); now += 20; });
      for (const text of "ab") draw(text);
      frames.pop()();
      for (const text of "cd") draw(text);
      const early = frames.length;
      const [next, pause] = timers.pop();
      next();
      frames.pop()();
      timers.pop()[0]();
      return [drawn.join(""), early, pause, frames.length];
    }"""
    async with visiting(PretendReplica()) as visit:
        assert await visit.page.evaluate(run) == ["bd", 0, 60, 0]
