// Colours for code: comments, strings, numbers and keywords, by families of languages.

import { element } from "./dom.js";

const C = ["//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)", "\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'?"];
const HASH = ["#[^\\n]*", C[1]];

const WORDS = {
  c: `auto bool break case catch char class const constexpr continue default delete do double else enum
    explicit extern false float for friend goto if inline int long namespace new nullptr operator
    private protected public register return short signed sizeof static struct switch template this
    throw true try typedef typename union unsigned using virtual void volatile while
    abstract boolean byte extends final finally implements import instanceof interface null package
    super synchronized throws var yield as async await base decimal event foreach get in internal is
    lock object out override params readonly ref sealed set string value when where`,
  go: `break case chan const continue default defer else fallthrough false for func go goto if import
    interface iota map nil package range return select struct switch true type var`,
  rust: `as async await break const continue crate dyn else enum extern false fn for if impl in let loop
    match mod move mut pub ref return self Self static struct super trait true type unsafe use where
    while`,
  js: `as async await break case catch class const continue debugger default delete do else enum export
    extends false finally for from function get if implements import in instanceof interface let new
    null of private protected public readonly return set static super switch this throw true try type
    typeof undefined var void while with yield`,
  python: `and as assert async await break case class continue def del elif else except False finally for
    from global if import in is lambda match None nonlocal not or pass raise return self True try while
    with yield`,
  ruby: `alias and begin break case class def defined do else elsif end ensure false for if in module next
    nil not or redo rescue retry return self super then true undef unless until when while yield`,
  shell: `case do done elif else esac export fi for function if in local return set then until while`,
  sql: `add all alter and as asc begin between by case check column commit constraint create cross default
    delete desc distinct drop else end exists false foreign from full group having if in index inner
    insert into is join key left like limit not null offset on or order outer primary references right
    rollback select set table then true union unique update using values view when where with`,
  data: `true false null yes no on off`,
};

// Language: its comments and strings, and its keywords.
const FAMILIES = {
  c: [C, "c"], go: [C, "go"], rust: [C, "rust"], json: [C, "data"],
  js: [[C[0], `${C[1]}|\`(?:\\\\.|[^\`\\\\])*\`?`], "js"],
  python: [[HASH[0], `"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|${C[1]}`], "python"],
  ruby: [HASH, "ruby"], shell: [HASH, "shell"], yaml: [HASH, "data"],
  sql: [["--[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)", C[1]], "sql"],
  html: [["<!--[\\s\\S]*?(?:-->|$)", `${C[1]}|</?[\\w:-]+|/?>`], "data"],
  css: [C, "data"],
};
const NAMES = {
  c: "c h cpp c++ cc hpp cuda cu java cs csharp c# kotlin kt scala swift dart php objc",
  go: "go golang", rust: "rust rs", json: "json jsonc json5",
  js: "js javascript mjs jsx ts typescript tsx", python: "python py python3 pyi",
  ruby: "ruby rb elixir", shell: "sh bash shell zsh console dockerfile make makefile",
  yaml: "yaml yml toml ini conf", sql: "sql sqlite postgres mysql",
  html: "html xml svg vue", css: "css scss less",
};
const FAMILY = new Map(
  Object.entries(NAMES).flatMap(([family, names]) => names.split(" ").map((name) => [name, family])),
);
const LONGEST = 50_000; // what follows is shown without colours
const AHEAD = 2; // characters behind a match that can decide where it ends

// Shows code in an element as it arrives. What can no longer change keeps its nodes.
export class Highlighter {
  #parent;
  #pattern = null;
  #words;
  #folded;
  #text = "";
  #settled = 0; // characters whose nodes stay
  #nodes = 0; // how many nodes these are
  #length = 0; // characters of the last of them, if it is a text

  constructor(parent, language) {
    this.#parent = parent;
    const family = FAMILY.get(language.toLowerCase());
    if (!family) return;
    const [[comments, strings], words] = FAMILIES[family];
    this.#words = new Set(WORDS[words].split(/\s+/));
    this.#pattern = new RegExp(`(${comments})|(${strings})|\\b(\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
    this.#folded = family === "sql";
  }

  append(more) {
    const room = this.#pattern ? Math.max(0, LONGEST - this.#text.length) : 0;
    this.#text += more.slice(0, room);
    if (room && more) this.#colour();
    this.#plain(more.slice(room));
  }

  #colour() {
    this.#rewind();
    const text = this.#text;
    let plain = this.#settled;
    this.#pattern.lastIndex = plain;
    for (let found; (found = this.#pattern.exec(text)); ) {
      const name = this.#nameOf(found);
      this.#plain(text.slice(plain, found.index));
      if (name) this.#parent.append(element("span", found[0], name));
      else this.#plain(found[0]);
      plain = this.#pattern.lastIndex;
      if (plain + AHEAD <= text.length) this.#settle(plain);
    }
    this.#plain(text.slice(plain));
  }

  #nameOf([, comment, string, number, word]) {
    if (word) return this.#words.has(this.#folded ? word.toLowerCase() : word) ? "keyword" : null;
    return comment ? "comment" : string ? "string" : number ? "number" : null;
  }

  #settle(end) {
    this.#settled = end;
    this.#nodes = this.#parent.childNodes.length;
    this.#length = this.#parent.lastChild.data?.length;
  }

  #rewind() {
    while (this.#parent.childNodes.length > this.#nodes) this.#parent.lastChild.remove();
    const last = this.#parent.lastChild;
    if (last?.data) last.deleteData(this.#length, last.length - this.#length);
  }

  #plain(text) {
    if (!text) return;
    const last = this.#parent.lastChild;
    if (last?.data) last.appendData(text);
    else this.#parent.append(text);
  }
}
