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
	spec := object{}
	if kind == "MachineDeployment" {
		spec["template"] = object{}
	}
	return object{"kind": kind, "metadata": object{"generation": 2.0}, "spec": spec, "status": object{"observedGeneration": observed, "conditions": list}}
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

const (
	ofCluster     = "cluster.x-k8s.io/Cluster"
	ofDeployment  = "cluster.x-k8s.io/MachineDeployment"
	ofMachinePool = "cluster.x-k8s.io/MachinePool"
	ofCapstan     = "*.capstan.dev/*"
)

// argoScripts returns the scripts of the ConfigMap of Argo CD.
func argoScripts(t *testing.T) map[string]string {
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
	wanted := map[string]string{}
	for _, name := range []string{ofCluster, ofDeployment, ofMachinePool, ofCapstan} {
		if wanted[name] = scripts[name].Lua; wanted[name] == "" || len(scripts) != 4 {
			t.Fatalf("want four scripts, and one for %s; found %v", name, scripts)
		}
	}
	for kind, group := range kinds(t) {
		if matched, err := filepath.Match("*.capstan.dev", group); err != nil || !matched {
			t.Errorf("%s does not match the group %s of %s", ofCapstan, group, kind)
		}
	}
	return wanted
}

func TestArgoCDHealth(t *testing.T) {
	scripts := argoScripts(t)
	check := func(script, what string, o object, want ...string) {
		t.Helper()
		status, message := health(t, scripts[script], o)
		if got := []string{status, message}; !reflect.DeepEqual(got, want) {
			t.Errorf("%s, %s: health %q, want %q", o["kind"], what, got, want)
		}
	}
	all := kinds(t)
	all["Cluster"], all["MachineDeployment"] = "cluster.x-k8s.io", "cluster.x-k8s.io"
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
		case "MachineDeployment":
			script, condition = ofDeployment, "Available"
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

func TestArgoCDHealthOfMachinePool(t *testing.T) {
	script := argoScripts(t)[ofMachinePool]
	pool := func(status object) object {
		return object{"kind": "MachinePool", "metadata": object{"generation": 2.0}, "spec": object{"replicas": 3.0, "template": object{}}, "status": status}
	}
	without := pool(nil)
	delete(without, "status")
	for name, test := range map[string]struct {
		object object
		want   string
	}{
		"no status":             {without, "Progressing"},
		"no replicas":           {pool(object{"observedGeneration": 2.0}), "Progressing"},
		"an earlier generation": {pool(object{"observedGeneration": 1.0, "availableReplicas": 3.0}), "Progressing"},
		"too few":               {pool(object{"observedGeneration": 2.0, "availableReplicas": 2.0}), "Progressing"},
		"too many":              {pool(object{"observedGeneration": 2.0, "availableReplicas": 4.0}), "Progressing"},
		"well":                  {pool(object{"observedGeneration": 2.0, "availableReplicas": 3.0}), "Healthy"},
	} {
		if got, _ := health(t, script, test.object); got != test.want {
			t.Errorf("%s: health %s, want %s", name, got, test.want)
		}
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
