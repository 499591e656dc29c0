// Renders the templates of cases.json with Go's text/template, as the reference for the tests.
// It writes expected.json: go run render.go
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
	"text/template/parse"
)

func asJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}

type Types []string

func (t Types) MarshalJSON() ([]byte, error) {
	if len(t) == 1 {
		return json.Marshal(t[0])
	}
	return json.Marshal([]string(t))
}

func (t *Types) UnmarshalJSON(data []byte) error {
	var one string
	if json.Unmarshal(data, &one) == nil {
		*t = Types{one}
		return nil
	}
	return json.Unmarshal(data, (*[]string)(t))
}

func (t Types) String() string {
	switch len(t) {
	case 0:
		return ""
	case 1:
		return t[0]
	}
	return "[" + strings.Join(t, " ") + "]"
}

type Property struct {
	AnyOf       []Property `json:"anyOf,omitempty"`
	Type        Types      `json:"type,omitempty"`
	Items       any        `json:"items,omitempty"`
	Description string     `json:"description,omitempty"`
	Enum        []any      `json:"enum,omitempty"`
	Properties  Properties `json:"properties,omitempty"`
	Required    []string   `json:"required,omitempty"`
}

type Properties map[string]Property

func (p Properties) String() string { return asJSON(p) }

type Parameters struct {
	Type       string     `json:"type"`
	Defs       any        `json:"$defs,omitempty"`
	Items      any        `json:"items,omitempty"`
	Required   []string   `json:"required,omitempty"`
	Properties Properties `json:"properties"`
}

func (p Parameters) String() string { return asJSON(p) }

type ToolFunction struct {
	Name        string     `json:"name"`
	Description string     `json:"description"`
	Parameters  Parameters `json:"parameters"`
}

func (f ToolFunction) String() string { return asJSON(f) }

type Tool struct {
	Type     string       `json:"type"`
	Items    any          `json:"items,omitempty"`
	Function ToolFunction `json:"function"`
}

func (t Tool) String() string { return asJSON(t) }

type Tools []Tool

func (t Tools) String() string { return asJSON(t) }

type Arguments map[string]any

func (a Arguments) String() string { return asJSON(a) }

type CallFunction struct {
	Index     int       `json:"index"`
	Name      string    `json:"name"`
	Arguments Arguments `json:"arguments"`
}

type Call struct {
	ID       string       `json:"id"`
	Function CallFunction `json:"function"`
}

type Message struct {
	Role       string `json:"role"`
	Content    string `json:"content"`
	Thinking   string `json:"thinking,omitempty"`
	ToolCalls  []Call `json:"tool_calls,omitempty"`
	ToolName   string `json:"name,omitempty"`
	ToolCallID string `json:"tool_call_id,omitempty"`
}

type Talk struct {
	Messages []Message `json:"messages"`
	Tools    Tools     `json:"tools"`
	Think    *bool     `json:"think"`
	Level    string    `json:"level"`
	Prompt   string    `json:"prompt"`
	Suffix   string    `json:"suffix"`
}

type Case struct {
	About    string `json:"about"`
	Template string `json:"template"`
	Talk     string `json:"talk"`
}

var typescript = map[string]string{"string": "string", "number": "number", "integer": "number",
	"boolean": "boolean", "array": "any[]", "object": "Record<string, any>", "null": "null"}

func toTypeScript(v any) string {
	property, ok := v.(Property)
	if !ok {
		return "any"
	}
	var names []string
	for _, option := range property.AnyOf {
		names = append(names, toTypeScript(option))
	}
	if names == nil {
		for _, name := range property.Type {
			if known, ok := typescript[name]; ok {
				names = append(names, known)
			} else {
				names = append(names, "any")
			}
		}
	}
	if names == nil {
		return "any"
	}
	return strings.Join(names, " | ")
}

var functions = template.FuncMap{
	"json":             asJSON,
	"toTypeScriptType": toTypeScript,
	"currentDate":      func() string { return "2026-03-01" },
	"yesterdayDate":    func() string { return "2026-02-28" },
}

// Consecutive messages of one role are one message, except those of tools.
func joined(messages []Message) (found []Message) {
	for index, message := range messages {
		for number, call := range message.ToolCalls {
			call.Function.Index = number
			messages[index].ToolCalls[number] = call
		}
		last := len(found) - 1
		if last >= 0 && found[last].Role == message.Role && message.Role != "tool" {
			found[last].Content += "\n\n" + message.Content
		} else {
			found = append(found, message)
		}
	}
	return found
}

func executed(t *template.Template, values map[string]any) string {
	var text strings.Builder
	if err := t.Execute(&text, values); err != nil {
		return "error"
	}
	return text.String()
}

// The nodes up to the first action with .Response.
func untilResponse(list *parse.ListNode) (*parse.ListNode, bool) {
	if list == nil {
		return nil, false
	}
	kept := &parse.ListNode{NodeType: parse.NodeList}
	for _, node := range list.Nodes {
		found := false
		switch n := node.(type) {
		case *parse.ActionNode:
			found = strings.Contains(n.Pipe.String(), ".Response")
		case *parse.IfNode:
			found = cutBranch(&n.BranchNode)
		case *parse.WithNode:
			found = cutBranch(&n.BranchNode)
		case *parse.RangeNode:
			found = cutBranch(&n.BranchNode)
		}
		kept.Nodes = append(kept.Nodes, node)
		if found {
			return kept, true
		}
	}
	return kept, false
}

func cutBranch(n *parse.BranchNode) (found bool) {
	if n.List, found = untilResponse(n.List); found {
		n.ElseList = nil
	} else {
		n.ElseList, found = untilResponse(n.ElseList)
	}
	return found
}

func byTurns(t *template.Template, source string, messages []Message, values map[string]any) string {
	if !strings.Contains(source, ".Response") {
		t = template.Must(template.New("").Option("missingkey=zero").Funcs(functions).Parse(source + "{{ .Response }}"))
	}
	text := ""
	turn := map[string]any{}
	begin := func() {
		turn = map[string]any{"System": "", "Prompt": "", "Response": ""}
		for _, name := range []string{"Think", "ThinkLevel", "IsThinkSet"} {
			turn[name] = values[name]
		}
	}
	begin()
	for _, message := range messages {
		prompted, answered := turn["Prompt"] != "", turn["Response"] != ""
		switch message.Role {
		case "system":
			if prompted || answered {
				text += executed(t, turn)
				begin()
			}
			turn["System"] = message.Content
		case "user":
			if answered {
				text += executed(t, turn)
				begin()
			}
			turn["Prompt"] = message.Content
		case "assistant":
			turn["Response"] = message.Content
		}
	}
	root, _ := untilResponse(t.Tree.Root.CopyList())
	last := template.Must(t.Clone())
	last.Tree.Root = root
	return text + executed(last, turn)
}

func rendered(source string, talk Talk) string {
	t, err := template.New("").Option("missingkey=zero").Funcs(functions).Parse(source)
	if err != nil {
		return "error"
	}
	if talk.Suffix != "" {
		return executed(t, map[string]any{"Prompt": talk.Prompt, "Suffix": talk.Suffix, "Response": ""})
	}
	var systems []string
	for _, message := range talk.Messages {
		if message.Role == "system" {
			systems = append(systems, message.Content)
		}
	}
	think := talk.Think != nil && *talk.Think
	if think && talk.Level == "" {
		talk.Level = "medium"
	}
	messages := joined(talk.Messages)
	values := map[string]any{"System": strings.Join(systems, "\n\n"), "Messages": messages,
		"Tools": talk.Tools, "Response": "", "Think": think, "ThinkLevel": talk.Level,
		"IsThinkSet": talk.Think != nil}
	if strings.Contains(source, ".Messages") {
		return executed(t, values)
	}
	return byTurns(t, source, messages, values)
}

func main() {
	data, err := os.ReadFile("cases.json")
	if err != nil {
		panic(err)
	}
	var given struct {
		Talks map[string]Talk `json:"talks"`
		Cases []Case          `json:"cases"`
	}
	if err := json.Unmarshal(data, &given); err != nil {
		panic(err)
	}
	texts := map[string]string{}
	for _, each := range given.Cases {
		texts[each.About] = rendered(each.Template, given.Talks[each.Talk])
	}
	text, err := json.MarshalIndent(texts, "", "  ")
	if err != nil {
		panic(err)
	}
	if err := os.WriteFile("expected.json", append(text, '\n'), 0o644); err != nil {
		panic(err)
	}
}
