package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestChoose(t *testing.T) {
	for name, test := range map[string]struct {
		s    surroundings
		want source
	}{
		"--kubeconfig before all others":              {surroundings{kubeconfig: "k", environment: "e", root: true, plane: true, home: true}, fromFlag},
		"--root before $KUBECONFIG":                   {surroundings{environment: "e", root: true, plane: true, home: true}, fromPlane},
		"$KUBECONFIG before the plane of this box":    {surroundings{environment: "e", plane: true, home: true}, fromEnvironment},
		"--context in $KUBECONFIG":                    {surroundings{environment: "e", context: "c", plane: true, home: true}, fromEnvironment},
		"--context in ~/.kube/config":                 {surroundings{context: "c", plane: true, home: true}, fromHome},
		"the plane of this box before ~/.kube/config": {surroundings{plane: true, home: true}, fromPlane},
		"~/.kube/config on a workstation":             {surroundings{home: true}, fromHome},
		"the error names the plane of this box":       {surroundings{}, fromPlane},
	} {
		if got := choose(test.s); got != test.want {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func TestStatusHere(t *testing.T) {
	for name, test := range map[string]struct {
		s         surroundings
		planeHere bool
		want      bool
	}{
		"the plane of this box":                          {surroundings{plane: true, home: true}, true, true},
		"the plane of this box before $KUBECONFIG":       {surroundings{environment: "e", plane: true, home: true}, true, true},
		"a plane without a kubeconfig":                   {surroundings{environment: "e", home: true}, true, true},
		"--kubeconfig before the plane of this box":      {surroundings{kubeconfig: "k", plane: true}, true, false},
		"--context before the plane of this box":         {surroundings{context: "c", plane: true}, true, false},
		"--context in $KUBECONFIG":                       {surroundings{context: "c", environment: "e", plane: true}, true, false},
		"--root before --context":                        {surroundings{context: "c", root: true, plane: true}, true, true},
		"--root without a plane":                         {surroundings{environment: "e", root: true, home: true}, false, true},
		"$KUBECONFIG without a plane":                    {surroundings{environment: "e"}, false, false},
		"~/.kube/config without a plane":                 {surroundings{home: true}, false, false},
		"the error of a box names the plane of this box": {surroundings{}, false, true},
	} {
		if got := statusHere(test.s, test.planeHere); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

const twoContexts = `apiVersion: v1
kind: Config
current-context: one
clusters: [{name: a, cluster: {server: "https://127.0.0.1:1"}}, {name: b, cluster: {server: "https://127.0.0.1:2"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: one, context: {cluster: a, user: u}}, {name: two, context: {cluster: b, user: u, namespace: team}}]
`

// TestContexts: the server and the namespace are those of the context, as with kubectl.
func TestContexts(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(file, []byte(twoContexts), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", file)
	for name, test := range map[string]struct {
		app               app
		given, server, in string
	}{
		"current context":        {app{}, "", "https://127.0.0.1:1", "default"},
		"named context":          {app{context: "two"}, "", "https://127.0.0.1:2", "team"},
		"namespace of the flag":  {app{context: "two"}, "mine", "https://127.0.0.1:2", "mine"},
		"kubeconfig of the flag": {app{kubeconfig: file, context: "two"}, "", "https://127.0.0.1:2", "team"},
	} {
		t.Run(name, func(t *testing.T) {
			loader, _, err := test.app.clientConfig()
			if err != nil {
				t.Fatal(err)
			}
			config, err := loader.ClientConfig()
			if err != nil || config.Host != test.server {
				t.Errorf("server %v, %v", config, err)
			}
			if in, err := test.app.namespace(test.given); err != nil || in != test.in {
				t.Errorf("namespace %q, %v", in, err)
			}
		})
	}
	data, err := (&app{context: "two"}).managementKubeconfig()
	if text := string(data); err != nil || !strings.Contains(text, "127.0.0.1:2") || strings.Contains(text, "127.0.0.1:1\n") {
		t.Errorf("kubeconfig of the context: %s, %v", text, err)
	}
}

// TestUnusableKubeconfigs: each way to use a kubeconfig names its source and the solution. `capstan get kubeconfig demo > $KUBECONFIG` reads an
// empty file.
func TestUnusableKubeconfigs(t *testing.T) {
	folder := t.TempDir()
	empty, contexts, damaged := filepath.Join(folder, "empty"), filepath.Join(folder, "contexts"), filepath.Join(folder, "damaged")
	if err := errors.Join(os.WriteFile(empty, nil, 0o600), os.WriteFile(contexts, []byte(twoContexts), 0o600), os.WriteFile(damaged, []byte("a: ["), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		app         app
		environment string
		code        int
		wrong       string
	}{
		"a missing file":                {app{kubeconfig: filepath.Join(folder, "missing")}, "", exitFailed, "from --kubeconfig: stat"},
		"an empty file":                 {app{kubeconfig: empty}, "", exitNotFound, "from --kubeconfig, found no file"},
		"a damaged file":                {app{kubeconfig: damaged}, "", exitFailed, "from --kubeconfig: error loading"},
		"an empty file of $KUBECONFIG":  {app{}, empty, exitNotFound, "from $KUBECONFIG, found no file with a cluster: correct or unset"},
		"a removed file of $KUBECONFIG": {app{}, filepath.Join(folder, "removed"), exitNotFound, "from $KUBECONFIG, found no file with a cluster: correct or unset"},
		"an unknown context":            {app{context: "three"}, contexts, exitFailed, "three"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KUBECONFIG", test.environment)
			_, err1 := test.app.management()
			_, err2 := test.app.namespace("")
			_, err3 := test.app.managementKubeconfig()
			for _, err := range []error{err1, err2, err3} {
				if err == nil || exitCode(err) != test.code || !strings.Contains(err.Error(), test.wrong) {
					t.Errorf("%v with code %d", err, exitCode(err))
				}
			}
		})
	}
}

func TestInvocation(t *testing.T) {
	for called, want := range map[string][]string{
		"/usr/bin/capstan":                  {"/usr/bin/capstan", "get", "clusters"},
		"/home/a/bin/kubectl-capstan":       {"kubectl capstan", "get", "clusters"},
		"kubectl-capstan.exe":               {"kubectl capstan", "get", "clusters"},
		"/usr/bin/kubectl_complete-capstan": {"kubectl capstan", "__complete", "get", "clusters"},
	} {
		program, rest := invocation([]string{called, "get", "clusters"})
		if got := append([]string{program}, rest...); !slices.Equal(got, want) {
			t.Errorf("%s: %q", called, got)
		}
	}
	var out bytes.Buffer
	c := (&app{out: &out, errOut: &out, program: pluginName}).command()
	c.SetOut(&out)
	c.SetArgs([]string{"get", "--help"})
	if err := c.Execute(); err != nil || !strings.Contains(out.String(), "kubectl capstan get clusters") && !strings.Contains(out.String(), "kubectl capstan get [flags]") {
		t.Errorf("help of the plugin: %v\n%s", err, out.String())
	}
}

func TestFit(t *testing.T) {
	for _, test := range []struct {
		line    string
		columns int
		want    string
	}{
		{"  1.0s  … workers: 1 of 2 ready\n", 0, "  1.0s  … workers: 1 of 2 ready\n"},
		{"  1.0s  … workers\n", 80, "  1.0s  … workers\n"},
		{"  1.0s  … workers: 1 of 2 ready\n", 20, "  1.0s  … workers:…\n"},
		{"abc\n", 1, "…\n"},
	} {
		got := fit(test.line, test.columns)
		if got != test.want || test.columns > 1 && len([]rune(strings.TrimSuffix(got, "\n"))) >= test.columns {
			t.Errorf("%d columns: %q", test.columns, got)
		}
	}
}

func TestProgressEvents(t *testing.T) {
	var out, events bytes.Buffer
	p := (&app{out: &out, errOut: &events, live: true, progressFormat: "json"}).newProgress()
	c := &clock{at: time.Unix(1000, 0)}
	p.start, p.now = c.at, c.now
	p.show([]step{{name: "workers", note: "0 of 1 ready"}})
	p.show([]step{{name: "workers", note: "0 of 1 ready"}}) // no change
	c.at = c.at.Add(1500 * time.Millisecond)
	p.show([]step{{name: "workers", done: true, note: "1 of 1 ready"}})
	p.close()
	var got []event
	for d := json.NewDecoder(&events); d.More(); {
		var e event
		if err := d.Decode(&e); err != nil {
			t.Fatal(err)
		}
		got = append(got, e)
	}
	want := []event{
		{time.Unix(1000, 0).UTC(), 0, "workers", "Waiting", "0 of 1 ready"},
		{time.Unix(1001, 5e8).UTC(), 1.5, "workers", "Done", "1 of 1 ready"},
	}
	if !slices.Equal(got, want) || out.Len() > 0 {
		t.Errorf("events %+v, output %q", got, out.String())
	}
}

func TestWithoutLinks(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	in := func(elements ...string) string { return filepath.Join(append([]string{dir}, elements...)...) }
	err = errors.Join(os.MkdirAll(in("real", "folder"), 0o700), os.Symlink(in("real"), in("link")), os.Symlink("link/folder", in("chain")),
		os.Symlink(in("real", "missing"), in("dangling")), os.Symlink("loop", in("loop")))
	if err != nil {
		t.Fatal(err)
	}
	for given, want := range map[string]string{
		"":                        "",
		in("real"):                in("real"),
		in("link"):                in("real"),
		in("link", "folder"):      in("real", "folder"),
		in("chain"):               in("real", "folder"),
		in("chain", "new", "one"): in("real", "folder", "new", "one"),
		in("dangling"):            in("real", "missing"),
		in("new"):                 in("new"),
	} {
		got := given
		if err := withoutLinks(&got); err != nil || got != want {
			t.Errorf("%s: got %s, %v, want %s", given, got, err, want)
		}
	}
	loop := in("loop")
	if err := withoutLinks(&loop); err == nil || exitCode(err) != exitUsage {
		t.Errorf("a loop: %v", err)
	}
	t.Chdir(in("real"))
	relative := "../link/folder"
	if err := withoutLinks(&relative); err != nil || relative != in("real", "folder") {
		t.Errorf("got %s, %v", relative, err)
	}
}
