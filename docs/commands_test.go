package docs

import (
	"cmp"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	block       = regexp.MustCompile("(?ms)^ *```([a-z]*)\n(.*?\n) *```")
	inline      = regexp.MustCompile("`([^`\n]+)`")
	makeTarget  = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
	builtTools  = regexp.MustCompile(`(?m)^BUILT_TOOLS := (.+)$`)
	assignment  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*=`)
	overwritten = regexp.MustCompile(`(?m)^.*> *"?\$\{?KUBECONFIG.*$`)
	// commandEnd separates the commands of a line.
	commandEnd = regexp.MustCompile(`\|\||&&|[|;()&\n]`)
)

// program is a program of this project with its commands, as its page of the reference describes it.
type program struct {
	// flags of each command, by its words after the name of the program. Those of "" apply to all commands.
	flags map[string][]string
}

// reference reads a page that internal/manpages wrote.
func reference(t *testing.T, name string) program {
	t.Helper()
	data, err := os.ReadFile("reference/" + name + ".md")
	if err != nil {
		t.Fatalf("%v: run `make generate`", err)
	}
	p := program{flags: map[string][]string{"": {"--help", "-h"}}}
	command := ""
	for line := range strings.Lines(string(data)) {
		if title, ok := strings.CutPrefix(line, "## "+name+" "); ok {
			command = strings.TrimSpace(title)
			p.flags[command] = []string{}
		}
		if strings.HasPrefix(line, "| `-") {
			cell, _, _ := strings.Cut(line[2:], " | ")
			for _, flag := range inline.FindAllStringSubmatch(cell, -1) {
				p.flags[command] = append(p.flags[command], flag[1])
			}
		}
	}
	if len(slices.Concat(slices.Collect(maps.Values(p.flags))...)) < 10 {
		t.Fatalf("reference/%s.md has only the flags %v", name, p.flags)
	}
	return p
}

// problem returns the error in the words after the name of the program. It returns "" if the program accepts them.
func (p program) problem(words []string) string {
	command, rest := "", words
	for len(rest) > 0 && p.flags[strings.TrimSpace(command+" "+rest[0])] != nil {
		command, rest = strings.TrimSpace(command+" "+rest[0]), rest[1:]
	}
	first := ""
	for _, word := range rest {
		if word == "--" {
			break // the arguments of another program
		}
		flag, _, _ := strings.Cut(word, "=")
		switch {
		case !strings.HasPrefix(word, "-") || word == "-":
			first = cmp.Or(first, word)
		case !slices.Contains(p.flags[command], flag) && !slices.Contains(p.flags[""], flag):
			return quoted(command) + " has no flag " + flag
		}
	}
	if first != "" && p.isGroup(command) {
		return quoted(command) + " has no command " + first
	}
	return ""
}

// isGroup reports whether the command has subcommands, and therefore no arguments.
func (p program) isGroup(command string) bool {
	for name := range p.flags {
		if name != "" && name != command && (command == "" || strings.HasPrefix(name, command+" ")) {
			return true
		}
	}
	return false
}

func quoted(command string) string {
	if command == "" {
		return "the program"
	}
	return "`" + command + "`"
}

// commands returns the commands of a document: the lines of its shell blocks, and code in its text. Each is a list of words.
func commands(document string) (all [][]string) {
	for _, found := range block.FindAllStringSubmatch(document, -1) {
		if found[1] != "sh" {
			continue
		}
		script := strings.ReplaceAll(found[2], "\\\n", " ")
		for line := range strings.Lines(script) {
			all = append(all, split(line)...)
		}
	}
	for _, found := range inline.FindAllStringSubmatch(block.ReplaceAllString(document, ""), -1) {
		all = append(all, split(found[1])...)
	}
	return all
}

// split returns the commands of a line without comments, redirections, variables and sudo.
func split(line string) (all [][]string) {
	if strings.HasPrefix(strings.TrimSpace(line), "#") {
		return nil
	}
	line, _, _ = strings.Cut(line, " #")
	line, _, _ = strings.Cut(line, "<<")
	for _, command := range commandEnd.Split(line, -1) {
		words := strings.Fields(command)
		for len(words) > 0 && (words[0] == "sudo" || words[0] == "$" || assignment.MatchString(words[0])) {
			words = words[1:]
		}
		for i, word := range words {
			if strings.HasPrefix(word, ">") || strings.HasPrefix(word, "2>") {
				words = words[:i]
				break
			}
		}
		if len(words) > 1 {
			all = append(all, words)
		}
	}
	return all
}

// TestCommands checks that each command of this project in a document exists, with its flags, and each target of make.
func TestCommands(t *testing.T) {
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, found := range makeTarget.FindAllStringSubmatch(string(makefile), -1) {
		targets[found[1]] = true
	}
	for _, found := range builtTools.FindAllStringSubmatch(string(makefile), -1) {
		for target := range strings.FieldsSeq(found[1]) {
			targets[target] = true
		}
	}
	programs := map[string]program{"capstan": reference(t, "capstan"), "capstand": reference(t, "capstand"), "manager": reference(t, "manager")}
	checked := 0
	for _, document := range documents(t) {
		data, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, words := range commands(string(data)) {
			name := filepath.Base(words[0])
			if p, ok := programs[name]; ok {
				checked++
				if problem := p.problem(unquote(words[1:])); problem != "" {
					t.Errorf("%s: %s: %s", document, strings.Join(words, " "), problem)
				}
			}
			if name != "make" {
				continue
			}
			for _, target := range words[1:] {
				if checked++; !targets[target] && !assignment.MatchString(target) && !strings.HasPrefix(target, "build-kube-") {
					t.Errorf("%s: %s: the Makefile has no target %s", document, strings.Join(words, " "), target)
				}
			}
		}
	}
	if checked < 200 {
		t.Errorf("found only %d commands", checked)
	}
}

// TestKubeconfigsAreNotOverwritten checks that no document writes the file that its commands use as kubeconfig. The shell empties the
// file before the command reads it.
func TestKubeconfigsAreNotOverwritten(t *testing.T) {
	for _, document := range documents(t) {
		data, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		if found := overwritten.Find(data); found != nil {
			t.Errorf("%s: %s: a command reads $KUBECONFIG", document, found)
		}
	}
}

// unquote joins the words of a quoted argument.
func unquote(words []string) (all []string) {
	open := ""
	for _, word := range words {
		if open != "" {
			all[len(all)-1] += " " + word
			if strings.HasSuffix(word, open) {
				open = ""
			}
			continue
		}
		all = append(all, word)
		for _, quote := range []string{"'", `"`} {
			if strings.Count(word, quote)%2 == 1 {
				open = quote
			}
		}
	}
	return all
}

func TestProblem(t *testing.T) {
	p := program{flags: map[string][]string{
		"": {"--root", "-o"}, "get": {}, "get kubeconfig": {"--management"}, "logs": {"--follow", "-f"},
	}}
	for line, want := range map[string]string{
		"capstan get kubeconfig demo":              "",
		"capstan get kubeconfig --management":      "",
		"capstan get kubeconfig --root=/x":         "",
		"capstan get kubeconfig --follow":          "`get kubeconfig` has no flag --follow",
		"capstan get clusters":                     "`get` has no command clusters",
		"capstan logs a -f":                        "",
		"capstan logs a -- --other":                "",
		"capstan log a":                            "the program has no command log",
		"FOO=1 sudo capstan logs a # --nothing":    "",
		"kubectl get nodes | bin/capstan logs -x ": "`logs` has no flag -x",
	} {
		for _, words := range split(line) {
			if filepath.Base(words[0]) != "capstan" {
				continue
			}
			if got := p.problem(words[1:]); got != want {
				t.Errorf("%s: got %q, want %q", line, got, want)
			}
		}
	}
}
