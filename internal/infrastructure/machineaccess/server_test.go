package machineaccess

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/yaml"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/accessapi"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/infrastructure/connections/fakehost"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

var env *testenv.Env

func TestMain(m *testing.M) {
	os.Exit(testenv.Run(m, testenv.Options{AddToScheme: []func(*runtime.Scheme) error{infrav1.AddToScheme}}, &env))
}

// fixture is a served API with two namespaces, each with one machine of the same host.
type fixture struct {
	*testing.T
	ctx              context.Context
	server           *httptest.Server
	proxy, other     pki.Authority
	mine, theirs     string // namespaces
	host             *fakehost.Host
	object           *infrav1.CapstanHost
	recorder         *events.FakeRecorder
	managementPlane  string
	frontProxyClient tls.Certificate
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{T: t, ctx: t.Context(), proxy: authority(t), other: authority(t), mine: env.Namespace(t), theirs: env.Namespace(t),
		host: fakehost.New(t), recorder: events.NewFakeRecorder(10)}
	system := &corev1.Namespace{}
	f.must(env.Client.Get(f.ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, system))
	f.managementPlane = string(system.UID)
	f.object = &infrav1.CapstanHost{ObjectMeta: metav1.ObjectMeta{GenerateName: "host-"}, Spec: infrav1.CapstanHostSpec{Address: f.host.Address()}}
	f.must(env.Client.Create(f.ctx, f.object))
	f.publishFrontProxy()
	f.serve()
	f.frontProxyClient = f.certificate(f.proxy, "front-proxy-client")
	for _, namespace := range []string{f.mine, f.theirs} {
		f.onHost(namespace, "one", "m-"+namespace)
		f.machine(namespace, "one", "m-"+namespace)
	}
	f.grant(f.mine, "reader", "get", accessapi.Log)
	f.grant(f.mine, "reader", "get", accessapi.Exec) // as a role with all resources and the verb get
	f.grant(f.mine, "root", "create", accessapi.Exec)
	f.grant(f.theirs, "thief", "get", accessapi.Log)
	f.grant(f.mine, "loader", "create", accessapi.Images)
	f.grant(f.mine, "proxy", "create", accessapi.Proxy) // as a role for all paths with this name
	return f
}

func (f *fixture) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func authority(t *testing.T) pki.Authority {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	a, err := pki.NewAuthority("test", key, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func (f *fixture) certificate(by pki.Authority, name string) tls.Certificate {
	f.Helper()
	key, err := pki.NewKey()
	f.must(err)
	cert, err := by.Sign(pki.Leaf{CommonName: name, Usages: pki.Client}, key.Public(), time.Hour, time.Now())
	f.must(err)
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}
}

// publishFrontProxy publishes the front proxy as the API server does that forwards requests.
func (f *fixture) publishFrontProxy() {
	f.Helper()
	shared := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: frontProxyConfigMap}}
	f.must(retry.OnError(retry.DefaultBackoff, func(error) bool { return true }, func() error { // The API server writes it, too.
		_, err := controllerutil.CreateOrUpdate(f.ctx, env.Client, shared, func() error {
			shared.Data = map[string]string{
				"requestheader-client-ca-file": string(pki.EncodeCert(f.proxy.Cert)), "requestheader-allowed-names": `["front-proxy-client"]`,
				"requestheader-username-headers": `["X-Remote-User"]`, "requestheader-group-headers": `["X-Remote-Group"]`,
				"requestheader-extra-headers-prefix": `["X-Remote-Extra-"]`, "requestheader-uid-headers": `["X-Remote-Uid"]`,
			}
			return nil
		})
		return err
	}))
}

// serve serves with the role of the provider, and waits until the front proxy is known.
func (f *fixture) serve() {
	f.Helper()
	config := rest.CopyConfig(env.Config)
	config.Impersonate.UserName = f.bindManager()
	clientset, err := kubernetes.NewForConfig(config)
	f.must(err)
	proxy, err := newFrontProxy(clientset)
	f.must(err)
	ctx, cancel := context.WithCancel(f.ctx)
	f.Cleanup(cancel)
	go func() { _ = proxy.Start(ctx) }()
	c, err := client.New(config, client.Options{Scheme: env.Scheme})
	f.must(err)
	handler := &Server{Authenticator: proxy, Client: c, Reader: c, Recorder: f.recorder, MaxImageBytes: maxImage, Stopped: ctx}
	f.server = httptest.NewUnstartedServer(handler)
	f.server.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12}
	f.server.StartTLS()
	f.Cleanup(f.server.Close)
	expect.True(f, "the front proxy is known", func() bool {
		verify, ok := proxy.authority.VerifyOptions()
		return ok && len(proxy.headers.UsernameHeaders()) > 0 && trusts(verify, f.proxy.Cert)
	})
}

func trusts(o x509.VerifyOptions, cert *x509.Certificate) bool {
	_, err := cert.Verify(x509.VerifyOptions{Roots: o.Roots})
	return err == nil
}

// bindManager creates a user with the shipped role.
func (f *fixture) bindManager() string {
	f.Helper()
	role := &rbacv1.ClusterRole{}
	data, err := os.ReadFile("../../../config/infrastructure/rbac/role.yaml")
	f.must(err)
	f.must(yaml.UnmarshalStrict(data, role))
	role.Name = "manager-" + f.mine
	f.must(env.Client.Create(f.ctx, role))
	f.must(env.Client.Create(f.ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: role.Name}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name}}))
	return role.Name
}

func (f *fixture) grant(namespace, user, verb, subresource string) {
	f.Helper()
	name := user + "-" + verb + "-" + subresource
	f.must(env.Client.Create(f.ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{accessapi.GroupVersion.Group}, Resources: []string{accessapi.Resource + "/" + subresource}, Verbs: []string{verb}}}}))
	f.must(env.Client.Create(f.ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name}}))
}

// onHost makes a machine on the host.
func (f *fixture) onHost(namespace, name, id string) {
	f.Helper()
	network := &hostpb.Network{Id: "n-" + namespace, Namespace: namespace, Name: "c", Cidr: map[bool]string{true: "10.1.0.0/24", false: "10.2.0.0/24"}[namespace == f.mine]}
	address := map[bool]string{true: "10.1.0.10", false: "10.2.0.10"}[namespace == f.mine]
	_, err := f.host.EnsureNetwork(f.ctx, network)
	f.must(err)
	_, err = f.host.EnsureMachine(f.ctx, &hostpb.EnsureMachineRequest{Spec: &hostpb.MachineSpec{
		Id: id, Namespace: namespace, Name: name, Cpus: 1, MemoryBytes: 1 << 30, Image: "host", KubernetesVersion: "v1.36.3",
		Network: network, Addresses: []*hostpb.Address{{Address: address, Prefix: 24}},
	}, BootstrapData: []byte("data")})
	f.must(err)
}

func (f *fixture) machine(namespace, name, id string, change ...func(*infrav1.CapstanMachine)) {
	f.Helper()
	m := &infrav1.CapstanMachine{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: infrav1.CapstanMachineSpec{ID: id, HostName: f.object.Name}}
	for _, c := range change {
		c(m)
	}
	f.must(env.Client.Create(f.ctx, m))
}

// call sends a request with the headers of a user.
func (f *fixture) call(method, path, user string, certificates ...tls.Certificate) (int, string) {
	f.Helper()
	code, body, err := f.send(f.ctx, nil, method, path, user, certificates...)
	f.must(err)
	return code, body
}

// send sends a request with a body.
func (f *fixture) send(ctx context.Context, content io.Reader, method, path, user string, certificates ...tls.Certificate) (int, string, error) {
	f.Helper()
	request, err := http.NewRequestWithContext(ctx, method, f.server.URL+path, content)
	f.must(err)
	if user != "" {
		request.Header.Set("X-Remote-User", user)
	}
	if user == "superuser" {
		request.Header.Set("X-Remote-Group", "system:masters")
	}
	request.Header.Set("X-Remote-Extra-Scopes", "a")
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: f.roots(), Certificates: certificates, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}

func (f *fixture) roots() *x509.CertPool {
	roots := x509.NewCertPool()
	roots.AddCert(f.server.Certificate())
	return roots
}

// Only requests of the API server have a caller, and each caller reaches the machines of his namespaces with his rights.
func TestRefusals(t *testing.T) {
	f := newFixture(t)
	// A tenant copies the id of another namespace's machine, and names hosts that do not have his machine.
	f.grant(f.theirs, "thief", "create", accessapi.Exec)
	f.machine(f.theirs, "copy", "m-"+f.mine)
	f.machine(f.theirs, "nowhere", "m-unknown")
	f.machine(f.theirs, "elsewhere", "m-"+f.theirs, func(m *infrav1.CapstanMachine) { m.Name, m.Spec.HostID = "elsewhere", "h-other" })
	f.machine(f.theirs, "waiting", "", func(m *infrav1.CapstanMachine) { m.Spec.HostName = "" })
	_, err := f.host.ClaimMachine(f.ctx, &hostpb.ClaimMachineRequest{Id: "m-" + f.theirs, Namespace: f.theirs, Name: "one", ManagementCluster: "another"})
	f.must(err)
	mine, theirs := accessapi.Path(f.mine, "one", accessapi.Log), func(name string) string { return accessapi.Path(f.theirs, name, accessapi.Log) }
	shell := accessapi.Path(f.mine, "one", accessapi.Exec)
	good := []tls.Certificate{f.frontProxyClient}
	for name, test := range map[string]struct {
		method, path, user string
		with               []tls.Certificate
		code               int
		says               string
	}{
		"a log":                                  {"GET", mine, "reader", good, 200, "log of one"},
		"the last line":                          {"GET", mine + "?service=kubelet&tailLines=1", "reader", good, 200, "service kubelet"},
		"discovery":                              {"GET", accessapi.Root(), "anybody", good, 200, "capstanmachines/log"},
		"headers without a certificate":          {"GET", mine, "superuser", nil, 401, ""},
		"headers with a certificate of another":  {"GET", mine, "superuser", []tls.Certificate{f.certificate(f.other, "front-proxy-client")}, 401, ""},
		"headers with a certificate of a client": {"GET", mine, "superuser", []tls.Certificate{f.certificate(f.proxy, "somebody")}, 401, ""},
		"a front proxy without a user":           {"GET", mine, "", good, 401, ""},
		"discovery without a certificate":        {"GET", accessapi.Root(), "superuser", nil, 401, ""},
		"a user without rights":                  {"GET", mine, "nobody", good, 403, "verb get"},
		"another namespace":                      {"GET", theirs("one"), "reader", good, 403, "verb get"},
		"a machine of another namespace":         {"GET", theirs("two"), "thief", good, 404, "not found"},
		"a copy of a machine":                    {"GET", theirs("copy"), "thief", good, 403, "belongs to another machine"},
		"a shell in a copy of a machine":         {"GET", accessapi.Path(f.theirs, "copy", accessapi.Exec), "thief", good, 400, "WebSocket"},
		"another host with the same name":        {"GET", theirs("elsewhere"), "thief", good, 409, "h-other"},
		"another management cluster":             {"GET", theirs("one"), "thief", good, 403, "another management cluster"},
		"a machine that the host does not have":  {"GET", theirs("nowhere"), "thief", good, 404, "m-unknown"},
		"a machine without a host":               {"GET", theirs("waiting"), "thief", good, 409, "no host"},
		"a shell with the right to read":         {"GET", shell, "reader", good, 403, "verb create"},
		"a log with the right of shells":         {"GET", mine, "root", good, 403, "verb get"},
		"a shell without a WebSocket":            {"POST", shell, "root", good, 400, "WebSocket"},
		"a path as service":                      {"GET", mine + "?service=../kubelet", "reader", good, 400, "service"},
		"a negative number of lines":             {"GET", mine + "?tailLines=-1", "reader", good, 400, "tailLines"},
		"images with the right of shells":        {"POST", accessapi.Path(f.mine, "one", accessapi.Images), "root", good, 403, "verb create"},
		"images with the right of the path":      {"POST", accessapi.Path(f.mine, "one", accessapi.Images), "proxy", good, 403, "verb create"},
		"images for another namespace":           {"POST", accessapi.Path(f.theirs, "one", accessapi.Images), "loader", good, 403, "verb create"},
		"images without the long path":           {"POST", accessapi.Root() + "/namespaces/" + f.mine + "/capstanmachines/one/images", "superuser", good, 404, "proxy/images"},
		"images for a copy of a machine":         {"POST", accessapi.Path(f.theirs, "copy", accessapi.Images), "superuser", good, 403, "belongs to another machine"},
		"images with a parameter":                {"POST", accessapi.Path(f.mine, "one", accessapi.Images) + "?host=x", "loader", good, 400, "parameters"},
		"images by another method":               {"GET", accessapi.Path(f.mine, "one", accessapi.Images), "superuser", good, 405, ""},
		"an unknown parameter":                   {"GET", mine + "?host=x", "reader", good, 400, "parameters"},
		"an unknown subresource":                 {"GET", accessapi.Path(f.mine, "one", "attach"), "superuser", good, 404, ""},
		"a path of another machine":              {"GET", accessapi.Root() + "/namespaces/" + f.mine + "/capstanmachines/..%2fone/log", "superuser", good, 404, ""},
		"another method":                         {"DELETE", mine, "superuser", good, 405, ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, body := f.call(test.method, test.path, test.user, test.with...)
			if code != test.code || !strings.Contains(body, test.says) {
				t.Errorf("%d %s, want %d and %q", code, body, test.code, test.says)
			}
		})
	}
}

// A command gets its standard input and its terminal's size, and returns its outputs and its exit code. The event names the user.
func TestExec(t *testing.T) {
	f := newFixture(t)
	for name, test := range map[string]struct {
		user    string
		command []string
		code    int
		stdout  string
		says    string
	}{
		"success":     {"root", []string{"cat"}, 0, "input", ""},
		"exit code":   {"root", []string{"exit", "3"}, 3, "input", ""},
		"no right":    {"reader", []string{"cat"}, -1, "", "verb create"},
		"not allowed": {"nobody", []string{"cat"}, -1, "", "verb create"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			err := f.exec(f.mine, test.user, accessapi.ExecOptions{Command: test.command, Stdin: true}, remotecommand.StreamOptions{
				Stdin: strings.NewReader("input"), Stdout: &stdout, Stderr: &stderr,
			})
			code := exec.CodeExitError{}
			switch {
			case test.code < 0:
				if err == nil || !strings.Contains(err.Error(), test.says) {
					t.Errorf("%v, want %q", err, test.says)
				}
				return
			case test.code > 0 && (!errors.As(err, &code) || code.Code != test.code), test.code == 0 && err != nil:
				t.Errorf("%v, want exit code %d", err, test.code)
			}
			if stdout.String() != test.stdout || stderr.String() != "errors" {
				t.Errorf("output %q, errors %q", &stdout, &stderr)
			}
			if event := <-f.recorder.Events; !strings.Contains(event, "User root started a command") || strings.Contains(event, "cat") {
				t.Errorf("event %q", event)
			}
		})
	}
}

// The end of the connection of a client ends the call at the host, which kills the command.
func TestExecEndsWithItsClient(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(f.ctx)
	in, feed := io.Pipe()
	out, seen := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- f.execute(ctx, f.mine, "root", accessapi.ExecOptions{Command: []string{"cat"}, Stdin: true}, remotecommand.StreamOptions{Stdin: in, Stdout: seen})
	}()
	_, err := feed.Write([]byte("a"))
	f.must(err)
	_, err = out.Read(make([]byte, 1))
	f.must(err)
	if f.host.Commands() != 1 {
		t.Fatalf("%d commands run", f.host.Commands())
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("the client ended without an error")
	}
	expect.True(t, "the command ends", func() bool { return f.host.Commands() == 0 })
}

func (f *fixture) exec(namespace, user string, o accessapi.ExecOptions, streams remotecommand.StreamOptions) error {
	return f.execute(f.ctx, namespace, user, o, streams)
}

func (f *fixture) execute(ctx context.Context, namespace, user string, o accessapi.ExecOptions, streams remotecommand.StreamOptions) error {
	key, err := pki.EncodeKey(f.frontProxyClient.PrivateKey.(crypto.Signer))
	f.must(err)
	leaf, err := x509.ParseCertificate(f.frontProxyClient.Certificate[0])
	f.must(err)
	config := &rest.Config{Host: f.server.URL, TLSClientConfig: rest.TLSClientConfig{
		CAData: pki.EncodeCert(f.server.Certificate()), CertData: pki.EncodeCert(leaf), KeyData: key,
	}}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			r.Header.Set("X-Remote-User", user)
			return next.RoundTrip(r)
		})
	})
	executor, err := remotecommand.NewWebSocketExecutor(config, "GET", f.server.URL+accessapi.Path(namespace, "one", accessapi.Exec)+"?"+o.Query().Encode())
	f.must(err)
	return executor.StreamWithContext(ctx, streams)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// Neither one user, nor the users of one namespace, nor all of them can open streams without a limit. An ended stream counts no more.
func TestStreams(t *testing.T) {
	s := &streams{}
	fill := func(from, to int, user, namespace string) (release func()) {
		t.Helper()
		for i := from; i < to; i++ {
			var ok bool
			if release, ok = s.take(cmp.Or(user, fmt.Sprint("user", i)), namespace); !ok {
				t.Fatalf("refused stream %d", i)
			}
		}
		return release
	}
	release := fill(0, maxUserStreams, "a", "one")
	if _, ok := s.take("a", "two"); ok {
		t.Error("a user has more streams than his limit")
	}
	release()
	fill(maxUserStreams-1, maxUserStreams, "a", "one")
	release = fill(maxUserStreams, maxNamespaceStreams, "", "one")
	if _, ok := s.take("other", "one"); ok {
		t.Error("a namespace has more streams than its limit")
	}
	release()
	fill(maxNamespaceStreams-1, maxNamespaceStreams, "", "one")
	fill(maxNamespaceStreams, maxStreams, "", "two")
	if _, ok := s.take("late", "three"); ok {
		t.Error("there are more streams than the limit")
	}
}

// A log that the host cannot finish breaks the connection: an incomplete log must not look complete.
func TestIncompleteLog(t *testing.T) {
	for name, end := range map[string]error{"complete": io.EOF, "broken": errors.New("host lost")} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				copyLog(w, &hostpb.LogChunk{Data: []byte("first")}, func() (*hostpb.LogChunk, error) { return nil, end })
			}))
			defer server.Close()
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
			if err != nil {
				t.Fatal(err)
			}
			response, err := server.Client().Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			body, err := io.ReadAll(response.Body)
			if string(body) != "first" || (err == nil) != errors.Is(end, io.EOF) {
				t.Errorf("%q, %v", body, err)
			}
		})
	}
}
