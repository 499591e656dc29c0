// Colours for code: comments, strings, numbers and keywords, by families of languages.

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
const LONGEST = 50_000; // longer code is shown without colours

export function highlight(element, text, language) {
  const family = FAMILIES[FAMILY.get((language ?? "").toLowerCase())];
  if (!family || text.length > LONGEST) {
    element.textContent = text;
    return;
  }
  const [[comments, strings], words] = family;
  const known = new Set(WORDS[words].split(/\s+/));
  const pattern = new RegExp(`(${comments})|(${strings})|\\b(\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const folded = words === "sql";
  let plain = 0;
  for (const found of text.matchAll(pattern)) {
    const [all, comment, string, number, word] = found;
    const name = comment ? "comment" : string ? "string" : number ? "number" : "keyword";
    if (word && !known.has(folded ? word.toLowerCase() : word)) continue;
    const span = document.createElement("span");
    span.className = name;
    span.textContent = all;
    element.append(text.slice(plain, found.index), span);
    plain = found.index + all.length;
  }
  element.append(text.slice(plain));
}
