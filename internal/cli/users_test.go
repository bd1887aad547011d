//go:build linux

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	urlpath "path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/embedded"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/testenv/expect"
)

func capstanMachine(namespace, name string, labels map[string]string) *infrav1.CapstanMachine {
	return &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}, Spec: infrav1.CapstanMachineSpec{ID: "machine-" + name}}
}

// testMachinePools: a machine pool shows what its machines wait for.
func (s *site) testMachinePools() {
	t, own := s.t, s.env.Namespace(s.t)
	ref := clusterv1.ContractVersionedObjectReference{APIGroup: infraGroup, Kind: "CapstanMachinePool", Name: "mp"}
	machine := capstanMachine(own, "mp-1", map[string]string{clusterv1.ClusterNameLabel: "c", clusterv1.MachinePoolNameLabel: "mp"})
	pool := &infrav1.CapstanMachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "mp"}}
	s.create(machine, pool, &clusterv1.MachinePool{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "mp"}, Spec: clusterv1.MachinePoolSpec{
		ClusterName: "c", Replicas: ptr.To[int32](2), Template: clusterv1.MachineTemplateSpec{Spec: clusterv1.MachineSpec{
			ClusterName: "c", InfrastructureRef: ref, Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("x")},
		}},
	}})
	since := metav1.NewTime(time.Now().Add(-7 * time.Minute))
	machine.Status.Conditions = []metav1.Condition{{Type: infrav1.HostAssignedCondition, Status: metav1.ConditionFalse, Reason: infrav1.NoHostReason, Message: "no host has 2Gi free", LastTransitionTime: since}}
	pool.Status.Conditions = []metav1.Condition{{Type: clusterv1.ScalingUpCondition, Status: metav1.ConditionTrue, Reason: clusterv1.ScalingUpReason, LastTransitionTime: since}}
	if err := s.env.Client.Status().Update(t.Context(), machine); err != nil {
		t.Fatal(err)
	}
	if err := s.env.Client.Status().Update(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	admin := s.kubeconfig("", own)
	out, err := s.capstan(admin, "describe", "machinepool", "mp")
	for _, text := range []string{"MachinePool " + own + "/mp", "0 of 2", "CapstanMachine mp-1: HostAssigned=False (NoHost), for 7m", noHostAdvice, "ScalingUp=True"} {
		if err != nil || !strings.Contains(out, text) {
			t.Errorf("describe without %q: %v\n%s", text, err, out)
		}
	}
	out, err = s.capstan(admin, "top", "machinepools", "-n", own)
	if err != nil || !strings.Contains(strings.Join(strings.Fields(out), " "), own+" mp c - 0/2 0/2 ScalingUp=True ScalingUp 7m") {
		t.Errorf("top: %v\n%s", err, out)
	}
}

// testCompletion: names of objects are completed as far as the user can list them, also for the plugin of kubectl.
func (s *site) testCompletion() {
	t, own := s.t, s.env.Namespace(s.t)
	s.create(clusterNamed(own, "completed"), capstanMachine(own, "node-1", nil), hostNamed("rack-1", own),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "tok-1", Labels: map[string]string{infrav1.HostTokenLabel: ""}}})
	shaped := clusterNamed(own, "shaped")
	shaped.Spec.Topology = clusterv1.Topology{ClassRef: clusterv1.ClusterClassRef{Name: "none"}, Version: "v1.36.3", Workers: clusterv1.WorkersTopology{
		MachineDeployments: []clusterv1.MachineDeploymentTopology{{Name: "md-0", Class: "worker"}}, MachinePools: []clusterv1.MachinePoolTopology{{Name: "mp-0", Class: "pool"}},
	}}
	s.create(shaped, deploymentOf(own, "completed", "completed-md"), deploymentOf(own, "shaped", "shaped-md-0-x7k2p"), deploymentOf(own, "third", "third-md"))
	s.bind("completer", viewerRole, own)
	admin, user := s.kubeconfig("", own), s.kubeconfig("completer", own)
	for name, test := range map[string]struct {
		kubeconfig string
		words      []string
		has, not   []string
	}{
		"kubeconfig":              {user, []string{"get", "kubeconfig", ""}, []string{"completed"}, []string{"node-1"}},
		"delete":                  {user, []string{"delete", "cluster", ""}, []string{"completed"}, nil},
		"scale":                   {user, []string{"scale", "cluster", ""}, []string{"completed"}, nil},
		"group of workers":        {user, []string{"scale", "cluster", "completed", "--group", ""}, []string{"completed-md"}, []string{"third-md"}},
		"group of a topology":     {user, []string{"scale", "cluster", "shaped", "--group", ""}, []string{"md-0", "mp-0"}, []string{"shaped-md-0-x7k2p"}},
		"group of no cluster":     {user, []string{"scale", "cluster", "--group", ""}, nil, []string{"md-0", "completed-md"}},
		"upgrade":                 {user, []string{"upgrade", "cluster", ""}, []string{"completed"}, nil},
		"a second name":           {user, []string{"delete", "cluster", "completed", ""}, nil, []string{"completed"}},
		"cluster of an image":     {user, []string{"load", "image", "x.tar", "--cluster", ""}, []string{"completed"}, nil},
		"logs":                    {user, []string{"logs", ""}, []string{"node-1"}, []string{"completed"}},
		"service":                 {user, []string{"logs", "node-1", ""}, []string{"kubelet", "etcd"}, nil},
		"shell":                   {user, []string{"shell", ""}, []string{"node-1"}, nil},
		"kind or name":            {user, []string{"describe", ""}, []string{"machinepool", "completed"}, []string{"rack-1"}},
		"name of a kind":          {admin, []string{"describe", "host", ""}, []string{"rack-1"}, []string{"completed"}},
		"kinds":                   {user, []string{"top", ""}, []string{"clusters", "machinepools"}, nil},
		"host to prune":           {admin, []string{"host", "prune", ""}, []string{"rack-1"}, nil},
		"token":                   {admin, []string{"host", "token", "revoke", "--" + namespaceFlag, own, ""}, []string{"tok-1"}, nil},
		"namespaces":              {admin, []string{"top", "--namespace", ""}, []string{own, "kube-system"}, nil},
		"namespace of a user":     {user, []string{"get", "kubeconfig", "-n", ""}, []string{own}, []string{"kube-system"}},
		"another namespace":       {admin, []string{"get", "kubeconfig", "-n", "default", ""}, nil, []string{"completed"}},
		"contexts":                {user, []string{"top", "--context", ""}, []string{"envtest"}, nil},
		"without the right":       {s.kubeconfig("nobody", own), []string{"get", "kubeconfig", ""}, nil, []string{"completed"}},
		"without a control plane": {filepath.Join(t.TempDir(), "missing"), []string{"get", "kubeconfig", ""}, nil, []string{"completed"}},
	} {
		t.Run(name, func(t *testing.T) {
			flags := []string{"--kubeconfig", test.kubeconfig, "--root", t.TempDir()}
			_, plugin := invocation(slices.Concat([]string{"/usr/bin/kubectl_complete-capstan"}, flags, test.words))
			// A busy API server answers after the patience of a completion.
			NewWithT(t).Eventually(func(g Gomega) {
				out, err := s.run(plugin...)
				lines := strings.Split(out, "\n")
				g.Expect(err).NotTo(HaveOccurred())
				for _, word := range test.has {
					g.Expect(lines).To(ContainElement(word))
				}
				for _, word := range test.not {
					g.Expect(lines).NotTo(ContainElement(word))
				}
			}, expect.Patience).Should(Succeed())
		})
	}
}

// deploymentOf returns a MachineDeployment of a cluster.
func deploymentOf(namespace, cluster, name string) *clusterv1.MachineDeployment {
	labels := map[string]string{clusterv1.ClusterNameLabel: cluster}
	return &clusterv1.MachineDeployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: labels}, Spec: clusterv1.MachineDeploymentSpec{
		ClusterName: cluster, Selector: metav1.LabelSelector{MatchLabels: labels},
		Template: clusterv1.MachineTemplateSpec{ObjectMeta: clusterv1.ObjectMeta{Labels: labels}, Spec: clusterv1.MachineSpec{
			ClusterName: cluster, Bootstrap: clusterv1.Bootstrap{DataSecretName: ptr.To("x")},
			InfrastructureRef: clusterv1.ContractVersionedObjectReference{APIGroup: infraGroup, Kind: "CapstanMachineTemplate", Name: "x"},
		}},
	}}
}

// throughProxy writes a kubeconfig of a user, for a proxy before the API server that answers requests for logs.
func (s *site) throughProxy(user, namespace string, log http.HandlerFunc) string {
	s.t.Helper()
	target, err := url.Parse(s.env.Config.Host)
	if err != nil {
		s.t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	if proxy.Transport, err = rest.TransportFor(s.env.Config); err != nil {
		s.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/", proxy)
	mux.HandleFunc(accessapi.Root()+"/", log)
	server := httptest.NewServer(mux)
	s.t.Cleanup(server.Close)
	file := s.kubeconfig(user, namespace)
	config, err := clientcmd.LoadFromFile(file)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, c := range config.Clusters {
		c.Server, c.CertificateAuthorityData = server.URL, nil
	}
	for _, auth := range config.AuthInfos {
		auth.Token = ""
	}
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		s.t.Fatal(err)
	}
	return file
}

// refuse answers with an error of the API.
func refuse(w http.ResponseWriter, err *apierrors.StatusError) {
	err.ErrStatus.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(err.ErrStatus.Code))
	_ = json.NewEncoder(w).Encode(err.ErrStatus)
}

// testBundledLogs: without a host on this box, the logs of machines come through the management cluster, without secrets.
func (s *site) testBundledLogs() {
	t, own, foreign := s.t, s.env.Namespace(s.t), s.env.Namespace(s.t)
	s.create(capstanMachine(own, "worker", nil), capstanMachine(foreign, "theirs", nil),
		capstanMachine(own, "first", map[string]string{clusterv1.MachineControlPlaneLabel: ""}),
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: own, Name: "planted"}, Data: map[string][]byte{"password": []byte(planted)}})
	resource := schema.GroupResource{Group: accessapi.GroupVersion.Group, Resource: accessapi.Resource}
	kubeconfig := s.throughProxy("", own, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		switch name := urlpath.Base(urlpath.Dir(r.URL.Path)); {
		case strings.Contains(r.URL.Path, foreign):
			refuse(w, apierrors.NewForbidden(resource, name, fmt.Errorf("User \"ada\" cannot get logs")))
		case q.Get("service") == "kubelet" && q.Get("tailLines") != "0" && q.Get("follow") == "false":
			_, _ = io.WriteString(w, "log of "+name+" with "+planted+"\n")
		case q.Get("service") == "etcd":
			_, _ = io.WriteString(w, "token="+planted+"-2\n")
		default:
			refuse(w, apierrors.NewNotFound(resource, name))
		}
	})
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	out, err := s.capstan(kubeconfig, "support-bundle", "--file", file)
	if err != nil || !strings.Contains(out, "capstanmachines/log.machines.capstan.dev (namespace "+foreign+"): capstanmachines.machines.capstan.dev \"theirs\" is forbidden: User \"ada\" cannot get logs") || !strings.Contains(out, "rolebinding NAME -n "+foreign+" --clusterrole "+logViewerRole) {
		t.Errorf("%v: %s", err, out)
	}
	contents := untar(t, file)
	for name, want := range map[string]string{
		"machines/" + own + "/worker/kubelet.log": "log of worker with (removed:" + own + "/planted)\n", "machines/" + own + "/first/kubelet.log": "log of first with (removed:" + own + "/planted)\n",
		"machines/" + own + "/first/etcd.log": "token=(removed)\n", "machines/" + own + "/worker/etcd.log": "", "machines/" + foreign + "/theirs/kubelet.log": "",
	} {
		if contents[name] != want {
			t.Errorf("%s: %q, want %q", name, contents[name], want)
		}
	}
	for name, text := range contents {
		if strings.Contains(text, planted) {
			t.Errorf("%s contains a secret: %s", name, text)
		}
	}
	if _, err := s.capstan(s.kubeconfig("", own), "support-bundle", "--file", file+"2"); err != nil || !strings.Contains(untar(t, file+"2")["errors.txt"], "expected a management cluster with the API") {
		t.Errorf("without the API: %v, %s", err, untar(t, file+"2")["errors.txt"])
	}
}

// TestLimitsOfLogs: large logs, silent hosts and many machines do not make a bundle large or slow.
func TestLimitsOfLogs(t *testing.T) {
	var machines []*unstructured.Unstructured
	for i := range 5 {
		machines = append(machines, parseObject(t, fmt.Sprintf("apiVersion: infrastructure.capstan.dev/v1beta2\nkind: CapstanMachine\nmetadata: {name: m%d, namespace: n}\nspec: {id: i%d}\n", i, i)))
	}
	machines[3].Object["status"] = map[string]any{"conditions": []any{map[string]any{"type": "MachineRunning", "status": "False"}}}
	wanted := withoutLogs(append(machines, parseObject(t, infraMachine)), map[string][]byte{"hosts/local/machines/i0/init.log": nil, "hosts/local/machines/i2/rootfs/var/log/capstan/kubelet.log": nil})
	if len(wanted) != 3 || wanted[0].GetName() != "m3" || wanted[1].GetName() != "m1" || wanted[2].GetName() != "m4" {
		t.Errorf("machines %v", wanted)
	}
	collector := func(limits logLimits, open func(ctx context.Context, service string) (io.ReadCloser, error)) *logCollector {
		return &logCollector{limits: limits, files: map[string][]byte{}, refusals: map[string]error{}, open: func(ctx context.Context, _, _ string, o accessapi.LogOptions) (io.ReadCloser, error) {
			return open(ctx, o.Service)
		}}
	}
	large := collector(logLimits{log: 10, total: 100, each: time.Minute}, func(context.Context, string) (io.ReadCloser, error) {
		return io.NopCloser(strings.NewReader(strings.Repeat("x", 1000))), nil
	})
	for _, m := range machines {
		large.machine(t.Context(), m)
	}
	total := 0
	for name, data := range large.files {
		total += len(data)
		if !strings.HasPrefix(string(data), "xxxxxxxxxx\n(the rest") {
			t.Errorf("%s: %q", name, data)
		}
	}
	if total > 150 || large.omitted != 5 || large.result() == nil {
		t.Errorf("%d bytes, %d machines omitted, %v", total, large.omitted, large.result())
	}
	calls := 0
	silent := collector(logLimits{log: 10, total: 100, each: time.Millisecond}, func(ctx context.Context, _ string) (io.ReadCloser, error) {
		calls++
		<-ctx.Done()
		return nil, ctx.Err()
	})
	silent.machine(t.Context(), machines[0])
	if calls != 1 || len(silent.errs) != 1 {
		t.Errorf("%d calls to a silent host, errors %v", calls, silent.errs)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	silent.machine(ended, machines[1])
	if calls != 1 || silent.omitted != 1 {
		t.Errorf("%d calls after the time for all logs, %d machines omitted", calls, silent.omitted)
	}
}

// fakeHost is a capstand with some machines.
type fakeHost struct {
	hostpb.UnimplementedHostServer
	machines []*hostpb.Machine
}

// ListMachines implements hostpb.HostServer.
func (h fakeHost) ListMachines(context.Context, *hostpb.ListMachinesRequest) (*hostpb.ListMachinesResponse, error) {
	return &hostpb.ListMachinesResponse{Machines: h.machines}, nil
}

// testDown: `capstan down` without a terminal refuses to remove machines of other planes, or of unknown ones if the plane does
// not answer, and volumes that outlive machines, unless --yes is given.
func (s *site) testDown() {
	own := s.env.Namespace(s.t)
	ours := capstanMachine(own, "ours", nil)
	ours.Spec.HostName = "local"
	s.create(ours)
	silent := s.silentKubeconfig()
	const repeat = ": repeat it with --yes"
	for name, test := range map[string]struct {
		state, kubeconfig string
		machines          []string // in the list of capstand
		stored            []string // in the folder of a host
		refusal           string
	}{
		"own machines":               {state: `{"hosts":["local"]}`, kubeconfig: string(s.env.Kubeconfig), machines: []string{"ours"}},
		"a foreign machine":          {`{"hosts":["local"]}`, string(s.env.Kubeconfig), []string{"ours", "foreign"}, nil, "1 machines of other management planes: team/foreign" + repeat},
		"silent plane":               {`{"hosts":["local"]}`, silent, nil, []string{"machines/a", "machines/b"}, "machines, possibly of other management planes: machine a, machine b (the plane of this box does not answer: "},
		"own machines, and volumes":  {`{"hosts":["local"]}`, string(s.env.Kubeconfig), []string{"ours"}, []string{"volumes/a", "volumes/b"}, "remove volumes with their data: volume a, volume b" + repeat},
		"foreign, and a volume":      {`{"hosts":["local"]}`, string(s.env.Kubeconfig), []string{"foreign"}, []string{"volumes/a"}, "team/foreign; and volumes with their data: volume a" + repeat},
		"silent plane, no machines":  {state: `{"hosts":["local"]}`, kubeconfig: silent},
		"damaged state":              {`{`, string(s.env.Kubeconfig), []string{"ours"}, []string{"machines/a", "volumes/b"}, "machine a; and volumes with their data: volume b (expected the state of an installation in "},
		"missing state":              {"", string(s.env.Kubeconfig), []string{"ours"}, []string{"machines/a", "volumes/b"}, "; and volumes with their data: volume b (open "},
		"silent capstand":            {`{"hosts":["local-2"]}`, string(s.env.Kubeconfig), nil, nil, "1 machines on other boxes: " + own + "/ours (expected an answer from capstand of host local-2, "},
		"silent plane that listened": {`{"hosts":["local"],"listen":":7443"}`, silent, nil, nil, "all machines of its hosts, which serve other management planes on :7443 (the plane of this box does not answer: "},
		"no installation any more":   {kubeconfig: string(s.env.Kubeconfig), stored: []string{"volumes/a"}},
	} {
		s.t.Run(name, func(t *testing.T) {
			l := embedded.Layout{Root: t.TempDir()}
			s.installation(t, l, test.state, test.kubeconfig, test.machines)
			for _, folder := range test.stored {
				if err := os.MkdirAll(filepath.Join(l.HostRoot("local"), folder), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			if name == "no installation any more" {
				if err := os.Remove(filepath.Join(l.Root, ".capstan")); err != nil {
					t.Fatal(err)
				}
			}
			out, err := s.run("down", "--root", l.Root)
			switch {
			case test.refusal == "" && err != nil:
				t.Errorf("expected no question, found %v %s", err, out)
			case test.refusal != "" && (err == nil || exitCode(err) != exitUsage || !strings.Contains(err.Error(), test.refusal) || !strings.Contains(err.Error(), repeat)):
				t.Errorf("expected the refusal %q, found %v", test.refusal, err)
			}
			if _, err := os.Stat(l.AdminKubeconfig()); test.refusal != "" && err != nil {
				t.Errorf("the refused command removed files: %v", err)
			}
			if err := os.RemoveAll(l.HostRoot("local")); err != nil { // no capstand is here that could remove the stored machines
				t.Fatal(err)
			}
			if out, err := s.run("down", "--root", l.Root, "--yes"); err != nil {
				t.Errorf("down --yes: %v %s", err, out)
			}
		})
	}
}

// silentKubeconfig returns a kubeconfig of an API server that does not run.
func (s *site) silentKubeconfig() string {
	s.t.Helper()
	config, err := clientcmd.Load(s.env.Kubeconfig)
	if err != nil {
		s.t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, c := range config.Clusters {
		c.Server = "https://" + listener.Addr().String()
	}
	if err := listener.Close(); err != nil {
		s.t.Fatal(err)
	}
	data, err := clientcmd.Write(*config)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(data)
}

// installation writes the files of a plane with one host, and serves the machines of its capstand.
func (s *site) installation(t *testing.T, l embedded.Layout, state, kubeconfig string, machines []string) {
	t.Helper()
	if err := os.MkdirAll(l.Sockets(), 0o700); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{filepath.Join(l.Root, ".capstan"): "\n", l.State(): state, l.AdminKubeconfig(): kubeconfig} {
		if content == "" {
			continue
		}
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	listener, err := net.Listen("unix", l.HostSocket("local"))
	if err != nil {
		t.Fatal(err)
	}
	host := fakeHost{}
	for _, name := range machines {
		host.machines = append(host.machines, &hostpb.Machine{Spec: &hostpb.MachineSpec{Id: "machine-" + name, Namespace: "team", Name: name}})
	}
	server := grpc.NewServer()
	hostpb.RegisterHostServer(server, host)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
}
