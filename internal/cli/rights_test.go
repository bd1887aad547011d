//go:build linux

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

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// site is an API server with the roles for users of the infrastructure provider.
type site struct {
	t   *testing.T
	env *testenv.Env
}

func newSite(t *testing.T) *site {
	t.Helper()
	env := startAPIServer(t)
	s := &site{t, env}
	data, err := os.ReadFile(filepath.Join(testenv.Root(), "config/infrastructure/rbac/viewer_roles.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, document := range strings.Split(string(data), "\n---\n") {
		role := &rbacv1.ClusterRole{}
		if err := yaml.UnmarshalStrict([]byte(document), role); err != nil {
			t.Fatal(err)
		}
		s.create(role)
	}
	return s
}

func (s *site) create(objects ...client.Object) {
	s.t.Helper()
	for _, o := range objects {
		if err := s.env.Client.Create(s.t.Context(), o); err != nil {
			s.t.Fatal(err)
		}
	}
}

// bind gives a user a ClusterRole, in one namespace unless it is empty.
func (s *site) bind(user, role, namespace string) {
	s.t.Helper()
	subjects := []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: user}}
	ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role}
	meta := metav1.ObjectMeta{GenerateName: "viewer-", Namespace: namespace}
	if namespace == "" {
		s.create(&rbacv1.ClusterRoleBinding{ObjectMeta: meta, RoleRef: ref, Subjects: subjects})
		return
	}
	s.create(&rbacv1.RoleBinding{ObjectMeta: meta, RoleRef: ref, Subjects: subjects})
}

// kubeconfig writes a kubeconfig of a user, whose contexts have the namespace; "" is an administrator.
func (s *site) kubeconfig(user, namespace string) string {
	s.t.Helper()
	config, err := clientcmd.Load(s.env.Kubeconfig)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, auth := range config.AuthInfos {
		auth.Impersonate = user
	}
	for _, c := range config.Contexts {
		c.Namespace = namespace
	}
	path := filepath.Join(s.t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// capstan runs the command.
func (s *site) capstan(kubeconfig string, args ...string) (string, error) {
	s.t.Helper()
	return s.run(append([]string{"--kubeconfig", kubeconfig, "--root", s.t.TempDir()}, args...)...)
}

func (s *site) run(args ...string) (string, error) {
	s.t.Helper()
	var out bytes.Buffer
	a := &app{out: &out, errOut: &out, program: "capstan"}
	c := a.command()
	c.SetOut(&out)
	c.SetArgs(args)
	err := c.ExecuteContext(s.t.Context())
	return out.String(), err
}

// clusterNamed returns a Cluster without any other object.
func clusterNamed(namespace, name string) *clusterv1.Cluster {
	return &clusterv1.Cluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: clusterv1.ClusterSpec{InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infraGroup, Kind: "CapstanCluster", Name: name}}}
}

func hostNamed(name, namespace string) *infrav1.CapstanHost {
	return &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: infrav1.CapstanHostSpec{Address: "10.0.0.1:8443", CredentialsRef: infrav1.SecretReference{Name: "x", Namespace: namespace}}}
}

// TestUsers runs the command for users of a management cluster with various rights.
func TestUsers(t *testing.T) {
	s := newSite(t)
	for name, test := range map[string]func(*site){
		"rights": (*site).testRights, "machine pools": (*site).testMachinePools, "completion": (*site).testCompletion,
		"logs in a bundle": (*site).testBundledLogs, "status": (*site).testStatus, "machines of other planes": (*site).testDown,
		"events": (*site).testEvents, "deletion": (*site).testDeletion,
	} {
		t.Run(name, func(t *testing.T) { test(&site{t, s.env}) })
	}
}

// testRights: top, describe and support-bundle show what their user can read, and name the rest with the role that gives it.
func (s *site) testRights() {
	t := s.t
	own, foreign := s.env.Namespace(t), s.env.Namespace(t)
	s.create(clusterNamed(own, "ours"), clusterNamed(foreign, "theirs"), hostNamed("box", own))
	s.bind("tenant", viewerRole, own)
	tenant, stranger, operator := s.kubeconfig("tenant", own), s.kubeconfig("stranger", own), s.kubeconfig("operator", own)
	bindHosts := "kubectl create clusterrolebinding NAME --clusterrole " + hostViewerRole
	s.bind("operator", viewerRole, "")
	s.bind("operator", hostViewerRole, "")

	for name, test := range map[string]struct {
		kubeconfig string
		args       []string
		code       int
		has, not   []string
	}{
		"top of a tenant": {tenant, []string{"top"}, exitOK,
			[]string{"ours", "capstanhosts.infrastructure.capstan.dev (the cluster): capstanhosts.infrastructure.capstan.dev is forbidden: User \"tenant\" cannot list", bindHosts, "clusters.cluster.x-k8s.io (all namespaces but " + own + ")"}, []string{"theirs", "box"}},
		"top of one namespace":          {tenant, []string{"top", "clusters", "-n", own}, exitOK, []string{"ours"}, []string{"Cannot be read"}},
		"top of a foreign namespace":    {tenant, []string{"top", "clusters", "-n", foreign}, exitFailed, []string{"rolebinding NAME -n " + foreign + " --clusterrole " + viewerRole}, []string{"theirs"}},
		"top of hosts without a right":  {tenant, []string{"top", "hosts"}, exitFailed, []string{bindHosts}, []string{"box"}},
		"top of a stranger":             {stranger, []string{"top"}, exitFailed, []string{"clusters.cluster.x-k8s.io", "capstanhosts"}, []string{"ours", "box"}},
		"top of an operator":            {operator, []string{"top"}, exitOK, []string{"ours", "theirs", "box"}, []string{"Cannot be read"}},
		"clusters of a tenant":          {tenant, []string{"get", "clusters"}, exitOK, []string{"ours", "clusters.cluster.x-k8s.io (all namespaces but " + own + ")"}, []string{"theirs"}},
		"clusters of a stranger":        {stranger, []string{"get", "clusters"}, exitFailed, []string{"clusters.cluster.x-k8s.io (all namespaces)"}, []string{"ours"}},
		"clusters of an operator":       {operator, []string{"get", "clusters"}, exitOK, []string{"ours", "theirs"}, []string{"Cannot be read"}},
		"describe of a tenant":          {tenant, []string{"describe", "ours"}, exitOK, []string{"Cluster " + own + "/ours", "capstanhosts.infrastructure.capstan.dev (the cluster): capstanhosts.infrastructure.capstan.dev \"ours\" is forbidden: User \"tenant\" cannot get"}, nil},
		"describe of a kind":            {tenant, []string{"describe", "cluster", "ours"}, exitOK, []string{"Waiting for: nothing"}, []string{"Cannot be read"}},
		"describe of nothing":           {tenant, []string{"describe", "cluster", "none"}, exitNotFound, []string{"there is no cluster none"}, []string{"Cannot be read"}},
		"describe without a right":      {tenant, []string{"describe", "host", "box"}, exitFailed, []string{bindHosts}, []string{"10.0.0.1"}},
		"describe of an operator":       {operator, []string{"describe", "box"}, exitOK, []string{"CapstanHost box", "10.0.0.1"}, []string{"Cannot be read"}},
		"support-bundle of a stranger":  {stranger, []string{"support-bundle", "--file", filepath.Join(t.TempDir(), "none")}, exitFailed, []string{"clusters.cluster.x-k8s.io (all namespaces)"}, nil},
		"support-bundle of a tenant":    {tenant, []string{"support-bundle", "--file", filepath.Join(t.TempDir(), "b")}, exitOK, []string{"entries", bindHosts, "secrets (all namespaces)"}, nil},
		"support-bundle of an operator": {operator, []string{"support-bundle", "--file", filepath.Join(t.TempDir(), "b")}, exitOK, []string{"secrets (all namespaces)"}, []string{"clusters", viewerRole}},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := s.capstan(test.kubeconfig, test.args...)
			code := exitOK
			if err != nil {
				code = exitCode(err)
				out += err.Error()
			}
			if code != test.code {
				t.Errorf("exit code %d, want %d", code, test.code)
			}
			for _, text := range test.has {
				if !strings.Contains(out, text) {
					t.Errorf("%q is missing", text)
				}
			}
			for _, text := range test.not {
				if strings.Contains(out, text) {
					t.Errorf("%q is shown", text)
				}
			}
			if t.Failed() {
				t.Log(out)
			}
		})
	}
	t.Run("json", func(t *testing.T) {
		out, err := s.capstan(tenant, "top", "-o", "json")
		var top struct {
			Clusters   []report
			Unreadable []gap
		}
		if err := errors.Join(err, json.Unmarshal([]byte(out), &top)); err != nil || len(top.Clusters) != 1 || !slices.ContainsFunc(top.Unreadable, func(g gap) bool { return g.Resource == "capstanhosts.infrastructure.capstan.dev" && g.Do != "" }) {
			t.Errorf("%v: %s", err, out)
		}
	})
}

// testDeletion: a user who cannot list clusters gets the refusal. A cluster that remains is no success.
func (s *site) testDeletion() {
	const namespace = "deletions"
	c := clusterNamed(namespace, "stays")
	c.Finalizers = []string{"example.com/stays"}
	s.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, c,
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "deleter"}, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{clusterv1.GroupVersion.Group}, Resources: []string{"clusters"}, Verbs: []string{"get", "delete"}},
		}})
	s.bind("ann", "deleter", namespace)
	out, err := s.capstan(s.kubeconfig("ann", namespace), "delete", "cluster", c.Name, "--timeout", "1m")
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "cannot list resource \"clusters\"") {
		s.t.Errorf("%v\n%s", err, out)
	}
	if err := s.env.Client.Get(s.t.Context(), client.ObjectKeyFromObject(c), c); err != nil || c.DeletionTimestamp.IsZero() {
		s.t.Errorf("%v, deleted at %v", err, c.DeletionTimestamp)
	}
	if err := testenv.Change(s.t.Context(), s.env.Client, c, func(c *clusterv1.Cluster) { c.Finalizers = nil }); err != nil {
		s.t.Error(err)
	}
}
