package cli

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/cli/dashboard"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// pageOf follows the page of `capstan dashboard` of a user in the background. Each value is the content of all sections.
func pageOf(t *testing.T, env *testenv.Env, user, namespace string, args ...string) <-chan map[string]json.RawMessage {
	t.Helper()
	config, err := clientcmd.Load(env.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	for _, auth := range config.AuthInfos {
		auth.Impersonate = user
	}
	for _, c := range config.Contexts {
		c.Namespace = namespace
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	url := make(chan string, 1)
	ctx, cancel := context.WithCancel(t.Context())
	a := &app{out: lineWriter(func(line []byte) {
		var ready struct{ URL string }
		if json.Unmarshal(line, &ready) == nil {
			url <- ready.URL
		}
	}), errOut: os.Stderr, program: "capstan"}
	c := a.command()
	c.SetArgs(append([]string{"dashboard", "--kubeconfig", path, "-o", "json"}, args...))
	ended := make(chan error, 1)
	go func() { ended <- c.ExecuteContext(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the command ends with: %v", err)
		}
	})
	select {
	case address := <-url:
		return sections(ctx, t, address+"stream")
	case err := <-ended:
		ended <- nil
		t.Fatalf("the command ends at once: %v", err)
	case <-time.After(expect.Patience):
		t.Fatal("the command prints no address")
	}
	return nil
}

type lineWriter func([]byte)

func (w lineWriter) Write(p []byte) (int, error) { w(bytes.TrimSpace(p)); return len(p), nil }

func sections(ctx context.Context, t *testing.T, url string) <-chan map[string]json.RawMessage {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = answer.Body.Close() })
	out := make(chan map[string]json.RawMessage)
	go func() {
		defer close(out)
		all, name := map[string]json.RawMessage{}, ""
		lines := bufio.NewScanner(answer.Body)
		lines.Buffer(nil, 16<<20)
		for lines.Scan() {
			if n, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
				name = n
			} else if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				all[name] = json.RawMessage(data)
				if name == "complete" {
					copied := map[string]json.RawMessage{}
					for n, d := range all {
						copied[n] = d
					}
					select {
					case out <- copied:
					case <-ctx.Done():
						return
					}
				}
			}
		}
	}()
	return out
}

// wanted waits until the page has these names, as "cluster team-a/a" or "host x", and these states of access.
func wanted(t *testing.T, page <-chan map[string]json.RawMessage, names []string, access map[string]string) map[string]json.RawMessage {
	t.Helper()
	var got string
	for end := time.After(expect.Patience); ; {
		select {
		case <-end:
			t.Fatalf("want %q and %v, found %s", names, access, got)
		case all, ok := <-page:
			if !ok {
				t.Fatalf("the stream ended; want %q, found %s", names, got)
			}
			found := []string{}
			for _, kind := range []string{"cluster", "host", "pool"} {
				var objects []struct{ Namespace, Name string }
				if err := json.Unmarshal(all[kind+"s"], &objects); err != nil {
					t.Fatal(err)
				}
				for _, o := range objects {
					found = append(found, kind+" "+strings.TrimPrefix(o.Namespace+"/"+o.Name, "/"))
				}
			}
			var kinds []dashboard.Access
			if err := json.Unmarshal(all["access"], &kinds); err != nil {
				t.Fatal(err)
			}
			same := slices.Equal(found, names)
			for _, k := range kinds {
				if want := access[k.Kind]; want != "" && want != strings.TrimSpace(k.State+" "+k.Namespace) {
					same = false
				}
			}
			if got = fmt.Sprintf("%q %+v", found, kinds); same {
				return all
			}
		}
	}
}

// TestDashboardRights: the page shows what its user can read, over a real API server.
func TestDashboardRights(t *testing.T) {
	env := startAPIServer(t)
	ctx := t.Context()
	own, foreign := env.Namespace(t), env.Namespace(t)
	create := func(objects ...client.Object) {
		t.Helper()
		for _, o := range objects {
			if err := env.Client.Create(ctx, o); err != nil {
				t.Fatal(err)
			}
		}
	}
	cluster := func(namespace, name string) *clusterv1.Cluster {
		return &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: clusterv1.ClusterSpec{InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infraGroup, Kind: "CapstanCluster", Name: name}}}
	}
	noHost := &infrav1.CapstanMachine{
		ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "m", Labels: map[string]string{clusterv1.ClusterNameLabel: "ours"}},
		Spec:       infrav1.CapstanMachineSpec{HostName: "box"},
	}
	create(&infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: "box"}, Spec: infrav1.CapstanHostSpec{Address: "10.0.0.1:8443", CredentialsRef: infrav1.SecretReference{Name: "x", Namespace: own}}},
		cluster(own, "ours"), cluster(foreign, "theirs"), noHost,
		&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "viewer"}, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"cluster.x-k8s.io"}, Resources: []string{"clusters", "machines"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{infraGroup}, Resources: []string{"capstanmachines"}, Verbs: []string{"get", "list", "watch"}},
		}},
		&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "viewer"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "viewer"}, Subjects: []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: "tenant"}}})
	noHost.Status.Conditions = []metav1.Condition{{Type: infrav1.HostAssignedCondition, Status: metav1.ConditionFalse, Reason: infrav1.NoHostReason, Message: "no host has 2Gi free", LastTransitionTime: metav1.Now()}}
	if err := env.Client.Status().Update(ctx, noHost); err != nil {
		t.Fatal(err)
	}

	t.Run("tenant", func(t *testing.T) {
		page := pageOf(t, env, "tenant", own)
		all := wanted(t, page, []string{"cluster " + own + "/ours", "host box"}, map[string]string{
			"Clusters": "readable " + own, "Machines on hosts": "readable " + own, "Hosts": "forbidden", "Events": "forbidden", "IP pools": "forbidden",
		})
		for name, data := range all {
			if strings.Contains(string(data), foreign) || strings.Contains(string(data), "theirs") || strings.Contains(string(data), "10.0.0.1") {
				t.Errorf("section %s contains what the tenant cannot read: %s", name, data)
			}
		}
		var waiting dashboard.Operations
		if err := json.Unmarshal(all["waiting"], &waiting); err != nil || len(waiting.Items) != 1 || waiting.Items[0].Name != "ours" || waiting.Items[0].Health != dashboard.Attention ||
			waiting.Items[0].Waits[0].Do != noHostAdvice {
			t.Errorf("waiting: %v, %s", err, all["waiting"])
		}
		create(cluster(own, "second"), cluster(foreign, "hidden"))
		wanted(t, page, []string{"cluster " + own + "/ours", "cluster " + own + "/second", "host box"}, nil)
	})
	t.Run("administrator", func(t *testing.T) {
		names := []string{"cluster " + own + "/ours", "cluster " + own + "/second", "cluster " + foreign + "/hidden", "cluster " + foreign + "/theirs"}
		slices.Sort(names)
		wanted(t, pageOf(t, env, "", own), append(names, "host box"), map[string]string{"Clusters": "readable", "Hosts": "readable", "Events": "readable", "Global IP pools": "readable"})
	})
	t.Run("one namespace", func(t *testing.T) {
		wanted(t, pageOf(t, env, "", own, "--namespace", foreign), []string{"cluster " + foreign + "/hidden", "cluster " + foreign + "/theirs", "host box"}, map[string]string{"Clusters": "readable"})
	})
	t.Run("no rights", func(t *testing.T) {
		wanted(t, pageOf(t, env, "stranger", foreign), []string{}, map[string]string{"Clusters": "forbidden", "Hosts": "forbidden", "Machines": "forbidden"})
	})
}

// startAPIServer starts an API server with our CRDs until the end of the test.
func startAPIServer(t *testing.T) *testenv.Env {
	t.Helper()
	env, err := testenv.Start(testenv.Options{AddToScheme: []func(*runtime.Scheme) error{infrav1.AddToScheme}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := env.Stop(); err != nil {
			t.Error(err)
		}
	})
	return env
}
