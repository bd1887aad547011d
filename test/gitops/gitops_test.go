// Package gitops runs the health checks of docs/gitops.md with the interpreters of Argo CD (Lua) and Flux (CEL).
package gitops

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/cel-go/cel"
	lua "github.com/yuin/gopher-lua"
	"sigs.k8s.io/yaml"
)

type object = map[string]any

// block unmarshals the YAML block of docs/gitops.md that contains a text.
func block(t *testing.T, containing string, into any) {
	t.Helper()
	page, err := os.ReadFile("../../docs/gitops.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, found := range regexp.MustCompile("(?s)\n```yaml\n(.*?\n)```").FindAllSubmatch(page, -1) {
		if strings.Contains(string(found[1]), containing) {
			if err := yaml.Unmarshal(found[1], into); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("docs/gitops.md has no YAML block with %q", containing)
}

// newObject returns an object of generation 2 whose status has the conditions, as "Ready=True".
func newObject(kind string, observed float64, conditions ...string) object {
	list := []any{}
	for _, c := range conditions {
		name, status, _ := strings.Cut(c, "=")
		list = append(list, object{"type": name, "status": status, "message": "about " + name})
	}
	return object{"kind": kind, "metadata": object{"generation": 2.0}, "spec": object{}, "status": object{"observedGeneration": observed, "conditions": list}}
}

// health runs a script as Argo CD does: without the libraries of Lua for strings and files.
func health(t *testing.T, script string, o object) (status, message string) {
	t.Helper()
	l := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer l.Close()
	for name, open := range map[string]lua.LGFunction{lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable} {
		if err := l.CallByParam(lua.P{Fn: l.NewFunction(open), Protect: true}, lua.LString(name)); err != nil {
			t.Fatal(err)
		}
	}
	l.SetGlobal("obj", luaValue(l, o))
	if err := l.DoString(script); err != nil {
		t.Fatal(err)
	}
	result, ok := l.Get(-1).(*lua.LTable)
	if !ok {
		t.Fatalf("the script returns %s, want a table", l.Get(-1).Type())
	}
	return result.RawGetString("status").String(), result.RawGetString("message").String()
}

func luaValue(l *lua.LState, value any) lua.LValue {
	switch v := value.(type) {
	case string:
		return lua.LString(v)
	case float64:
		return lua.LNumber(v)
	case []any:
		table := l.NewTable()
		for _, item := range v {
			table.Append(luaValue(l, item))
		}
		return table
	case object:
		table := l.NewTable()
		for key, item := range v {
			table.RawSetString(key, luaValue(l, item))
		}
		return table
	}
	return lua.LNil
}

// kinds returns the kinds of Capstan in a management cluster, with their groups. Each kind that is no template must have the fields
// that the script reads.
func kinds(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("../../config/*/crd/bases/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	groups := map[string]string{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd struct {
			Spec struct {
				Group string
				Names struct{ Kind string }
			}
		}
		if err := yaml.Unmarshal(data, &crd); err != nil {
			t.Fatal(err)
		}
		groups[crd.Spec.Names.Kind] = crd.Spec.Group
		observed := strings.Contains(string(data), "\n              observedGeneration:\n")
		if template := strings.HasSuffix(crd.Spec.Names.Kind, "Template"); template == observed {
			t.Errorf("%s is a template: %v, and has status.observedGeneration: %v", crd.Spec.Names.Kind, template, observed)
		}
	}
	if len(groups) < 13 {
		t.Fatalf("found only %d kinds", len(groups))
	}
	return groups
}

// argoScripts returns the scripts of the ConfigMap of Argo CD: for a Cluster, and for each kind of Capstan.
func argoScripts(t *testing.T) (ofCluster, ofCapstan string) {
	t.Helper()
	var config struct {
		Data map[string]string `json:"data"`
	}
	block(t, "resource.customizations", &config)
	scripts := map[string]struct {
		Lua string `json:"health.lua"`
	}{}
	if err := yaml.UnmarshalStrict([]byte(config.Data["resource.customizations"]), &scripts); err != nil {
		t.Fatal(err)
	}
	const pattern = "*.capstan.dev/*"
	ofCluster, ofCapstan = scripts["cluster.x-k8s.io/Cluster"].Lua, scripts[pattern].Lua
	if len(scripts) != 2 || ofCluster == "" || ofCapstan == "" {
		t.Fatalf("expected scripts for cluster.x-k8s.io/Cluster and %s, found %v", pattern, scripts)
	}
	for kind, group := range kinds(t) {
		if matched, err := filepath.Match("*.capstan.dev", group); err != nil || !matched {
			t.Errorf("%s does not match the group %s of %s", pattern, group, kind)
		}
	}
	return ofCluster, ofCapstan
}

func TestArgoCDHealth(t *testing.T) {
	ofCluster, ofCapstan := argoScripts(t)
	check := func(script, what string, o object, want ...string) {
		t.Helper()
		status, message := health(t, script, o)
		if got := []string{status, message}; !reflect.DeepEqual(got, want) {
			t.Errorf("%s, %s: health %q, want %q", o["kind"], what, got, want)
		}
	}
	all := kinds(t)
	all["Cluster"] = "cluster.x-k8s.io"
	for kind := range all {
		if strings.HasSuffix(kind, "Template") {
			template := object{"kind": kind, "metadata": object{"generation": 1.0}, "spec": object{"template": object{}}}
			check(ofCapstan, "a template", template, "Healthy", "a template has no state")
			continue
		}
		script, condition := ofCapstan, "Ready"
		switch kind {
		case "Cluster":
			script, condition = ofCluster, "Available"
		case "CapstanControlPlane":
			condition = "Available"
		}
		waiting := []string{"Progressing", "waiting for the condition " + condition}
		check(script, "no status", object{"kind": kind, "metadata": object{"generation": 1.0}}, waiting...)
		check(script, "no conditions", newObject(kind, 2), waiting...)
		check(script, "only others", newObject(kind, 2, "Paused=False"), waiting...)
		check(script, "an earlier generation", newObject(kind, 1, condition+"=True"), waiting...)
		check(script, "not yet", newObject(kind, 2, condition+"=False", "Paused=False"), "Progressing", "about "+condition)
		check(script, "unknown", newObject(kind, 2, condition+"=Unknown"), "Progressing", "about "+condition)
		check(script, "well", newObject(kind, 2, "Paused=False", condition+"=True", "RollingOut=False"), "Healthy", "about "+condition)
		check(script, "a rollout", newObject(kind, 2, condition+"=True", "RollingOut=True"), "Progressing", "about RollingOut")
	}
}

func TestFluxHealth(t *testing.T) {
	var kustomization struct {
		Spec struct {
			HealthCheckExprs []struct{ Kind, Current, InProgress string } `json:"healthCheckExprs"`
		} `json:"spec"`
	}
	block(t, "kustomize.toolkit.fluxcd.io", &kustomization)
	expressions := kustomization.Spec.HealthCheckExprs
	if len(expressions) != 1 || expressions[0].Kind != "Cluster" {
		t.Fatalf("expected the expressions of Cluster, found %v", expressions)
	}
	// Flux evaluates inProgress first. Without the field status, an expression fails, and Flux tries again.
	for name, test := range map[string]struct {
		object
		current, inProgress bool
	}{
		"no conditions":         {newObject("Cluster", 2), false, true},
		"only other conditions": {newObject("Cluster", 2, "Paused=False"), false, true},
		"not available":         {newObject("Cluster", 2, "Available=False"), false, true},
		"unknown":               {newObject("Cluster", 2, "Available=Unknown"), false, true},
		"available":             {newObject("Cluster", 2, "Paused=False", "Available=True"), true, false},
	} {
		if current := evaluate(t, expressions[0].Current, test.object); current != test.current {
			t.Errorf("%s: current is %v", name, current)
		}
		if inProgress := evaluate(t, expressions[0].InProgress, test.object); inProgress != test.inProgress {
			t.Errorf("%s: inProgress is %v", name, inProgress)
		}
	}
}

// evaluate evaluates an expression of Flux: the fields of the object are variables.
func evaluate(t *testing.T, expression string, o object) bool {
	t.Helper()
	env, err := cel.NewEnv()
	if err != nil {
		t.Fatal(err)
	}
	parsed, issues := env.Parse(expression)
	if issues.Err() != nil {
		t.Fatal(issues.Err())
	}
	program, err := env.Program(parsed)
	if err != nil {
		t.Fatal(err)
	}
	result, _, err := program.Eval(o)
	if err != nil {
		t.Fatal(err)
	}
	value, ok := result.Value().(bool)
	if !ok {
		t.Fatalf("%s is no bool: %v", expression, result)
	}
	return value
}
