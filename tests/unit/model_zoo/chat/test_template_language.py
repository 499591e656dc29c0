"""Go templates are distinguished from Jinja templates, and both are checked."""

import pytest

from model_zoo.chat.template_language import check_template, is_go_template
from runtime.errors import RequestError
from tests.chat_templates import template_source
from tools.reference_data import TEMPLATES

GO = [
    "{{ .Prompt }}",
    "{{.System}} x",
    "{{- if .System }}<|im_start|>system\n{{ .System }}{{- end }}",
    "{{ range $i, $_ := .Messages }}x{{ end }}",
    "{{- range .Messages }}{{ end }}",
    "{{ if or .System .Tools }}x{{ else }}y{{ end }}",
    '{{ define "tools" }}x{{ end }}',
    "{{- /* a comment */ -}}",
    "{{ $last := 3 }}",
]
JINJA = [
    "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "{{ bos_token }}{{- messages[0].content -}}",
    "{% if tools %}{{ tools | tojson }}{% else %}none{% endif %}",
    "{% for i in range(3) %}{{ i }}{% endfor %}{{ range(3) | join }}",
    "{{ 'a' if x else 'b' }}{{ .5 }}{{ not x }}{{ end_token }}{{ template_name }}",
    "plain",
    "",
]


@pytest.mark.parametrize("source", GO)
def test_go_templates_are_recognised_and_converted(source):
    assert is_go_template(source)
    check_template(source)


@pytest.mark.parametrize("source", JINJA)
def test_jinja_templates_are_not_taken_for_go_templates(source):
    assert not is_go_template(source)


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_are_jinja(name):
    check_template(template_source(name))


def test_a_jinja_template_is_compiled_to_check_it():
    check_template(JINJA[0])
    with pytest.raises(RequestError, match=r"template error: .*line 2"):
        check_template("a\n{% for x %}")


def test_a_go_template_that_is_not_supported_is_refused():
    with pytest.raises(RequestError, match=r"template error: line 2: the field \.Color"):
        check_template("{{ .Prompt }}\n{{ .Color }}")
