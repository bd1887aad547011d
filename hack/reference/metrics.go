package main

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"capstan.dev/capstan/internal/manpages"
)

// metric is a metric in the source.
type metric struct {
	name, kind, help string
	labels           []string
}

// metricGroup is a section of the page of metrics.
type metricGroup struct{ prefix, title string }

// metricGroups: the longest prefix of a metric decides.
var metricGroups = []metricGroup{
	{"capstan_", "Hosts and machines"},
	{"capstan_manager_", "Managers"},
	{"capstan_control_plane_", "Control planes"},
	{"capstan_ipam_", "Address pools"},
	{"capstan_balancer_", "Load balancers"},
	{"capstand_", "capstand"},
}

// metricsPage returns the page of metrics.
func metricsPage() ([]byte, error) {
	all, err := readMetrics("internal")
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString(generated + "# Metrics\n\n" +
		"The metrics of the managers, of capstand and of its load balancers. [Metrics](../metrics.md) describes how to read them, and the alerts.\n")
	for _, g := range metricGroups {
		fmt.Fprintf(&b, "\n## %s\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n", g.title)
		for _, m := range all {
			if g.contains(m.name) {
				var labels []string
				for _, label := range m.labels {
					labels = append(labels, manpages.Code(label))
				}
				fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", manpages.Code(m.name), m.kind, strings.Join(labels, ", "), manpages.Cell(m.help))
			}
		}
	}
	return b.Bytes(), nil
}

func (g metricGroup) contains(name string) bool {
	return strings.HasPrefix(name, g.prefix) && !slices.ContainsFunc(metricGroups, func(other metricGroup) bool {
		return len(other.prefix) > len(g.prefix) && strings.HasPrefix(name, other.prefix)
	})
}

var metricName = regexp.MustCompile(`^capstand?_[a-z0-9_]+$`)

// readMetrics reads the metrics that the packages below a folder declare, sorted by name.
func readMetrics(folder string) ([]metric, error) {
	found := map[string]metric{}
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		return readMetricsOf(path, found)
	})
	var all []metric
	for _, m := range found {
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b metric) int { return strings.Compare(a.name, b.name) })
	return all, err
}

// readMetricsOf adds the metrics of a package.
func readMetricsOf(folder string, found map[string]metric) error {
	names, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return err
	}
	var files []*ast.File
	p := declared{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, file)
		p.add(file)
	}
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			if m := p.metric(call); metricName.MatchString(m.name) {
				if strings.HasPrefix(m.name, "capstan_balancer_") { // capstand adds them when it reads a balancer.
					m.labels = append([]string{"namespace", "cluster"}, m.labels...)
				}
				found[m.name] = m
			}
			return true
		})
	}
	return nil
}

// declared are the expressions of the variables and constants of a package.
type declared map[string]ast.Expr

func (p declared) add(file *ast.File) {
	for _, decl := range file.Decls {
		d, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range d.Specs {
			if v, ok := spec.(*ast.ValueSpec); ok && len(v.Names) == len(v.Values) {
				for i, name := range v.Names {
					p[name.Name] = v.Values[i]
				}
			}
		}
	}
}

// metric returns the metric that a call makes: a constructor of the Prometheus client with options, or any function whose first
// arguments are a name and a help text. For others the name is empty.
func (p declared) metric(call *ast.CallExpr) metric {
	if len(call.Args) == 0 {
		return metric{}
	}
	if options, ok := call.Args[0].(*ast.CompositeLit); ok {
		return p.withOptions(call, options)
	}
	if len(call.Args) < 2 {
		return metric{}
	}
	m := metric{name: p.text(call.Args[0]), help: p.text(call.Args[1]), kind: "gauge"}
	if strings.HasSuffix(m.name, "_total") {
		m.kind = "counter"
	}
	for _, arg := range call.Args[2:] {
		if label := p.text(arg); label != "" {
			m.labels = append(m.labels, label)
		}
		m.labels = append(m.labels, p.list(arg)...)
	}
	return m
}

// withOptions returns the metric of a constructor such as NewCounterVec(CounterOpts{Name: …, Help: …}, labels).
func (p declared) withOptions(call *ast.CallExpr, options *ast.CompositeLit) (m metric) {
	kind, ok := options.Type.(*ast.SelectorExpr)
	if !ok || !strings.HasSuffix(kind.Sel.Name, "Opts") {
		return metric{}
	}
	m.kind = strings.ToLower(strings.TrimSuffix(kind.Sel.Name, "Opts"))
	for _, element := range options.Elts {
		if pair, ok := element.(*ast.KeyValueExpr); ok {
			switch fmt.Sprint(pair.Key) {
			case "Name":
				m.name = p.text(pair.Value)
			case "Help":
				m.help = p.text(pair.Value)
			}
		}
	}
	if len(call.Args) > 1 {
		m.labels = p.list(call.Args[1])
	}
	return m
}

// text returns the value of a string, or "".
func (p declared) text(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		value, _ := strconv.Unquote(e.Value)
		return value
	case *ast.Ident:
		if value, ok := p[e.Name].(*ast.BasicLit); ok {
			return p.text(value)
		}
	}
	return ""
}

// list returns the values of a list of strings: a literal, a variable, a part of one, or one with further values.
func (p declared) list(e ast.Expr) (values []string) {
	switch e := e.(type) {
	case *ast.CompositeLit:
		for _, element := range e.Elts {
			values = append(values, p.text(element))
		}
	case *ast.Ident:
		if value, ok := p[e.Name].(*ast.CompositeLit); ok {
			return p.list(value)
		}
	case *ast.SliceExpr:
		return p.list(e.X)
	case *ast.CallExpr:
		if fmt.Sprint(e.Fun) == "append" {
			values = p.list(e.Args[0])
			for _, more := range e.Args[1:] {
				values = append(values, p.text(more))
			}
		}
	}
	return values
}
