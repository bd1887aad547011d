package bootstrap

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	bootstrapv1beta1 "capstan.dev/capstan/api/bootstrap/v1beta1"
	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

// rule is a change of a config that is accepted, or refused with a message.
type rule struct {
	change func(*bootstrapv1.CapstanConfigSpec)
	want   string // empty: accepted
}

type rules map[string]rule

// TestRules checks the rules of the CRD and the webhook, for configs and templates.
func TestRules(t *testing.T) {
	namespace := env.Namespace(t)
	for _, all := range []rules{generalRules(), nodeRules(), componentRules(), fileRules(t), registryRules(), userRules(), imageRules(), proxyRules(), dnsRules()} {
		checkRules(t, namespace, all)
	}
}

func checkRules(t *testing.T, namespace string, all rules) {
	t.Helper()
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			config := &bootstrapv1.CapstanConfig{}
			config.Namespace, config.GenerateName = namespace, "test-"
			c.change(&config.Spec)
			testenv.Refused(t, env.Client.Create(context.Background(), config, client.DryRunAll), c.want)
			template := &bootstrapv1.CapstanConfigTemplate{}
			template.Namespace, template.GenerateName = namespace, "test-"
			template.Spec.Template.Spec = config.Spec
			testenv.Refused(t, env.Client.Create(context.Background(), template, client.DryRunAll), c.want)
		})
	}
}

func generalRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	return rules{
		"plain":                        {func(s *spec) { s.PreCommands = []string{"true"} }, ""},
		"a role that is none":          {func(s *spec) { s.Role = "Boss" }, "Unsupported value"},
		"cluster settings of a worker": {func(s *spec) { s.Role = bootstrapv1.RoleWorker; s.Cluster.DNS = bootstrapv1.DNSNone }, "cluster requires a control plane role"},
		"an empty command":             {func(s *spec) { s.PreCommands = []string{""} }, "at least 1"},
	}
}

func nodeRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	label := func(name string) func(*spec) {
		return func(s *spec) { s.Node.Labels = map[string]string{name: "x"} }
	}
	return rules{
		"a taint of another effect":     {func(s *spec) { s.Node.Taints = &[]bootstrapv1.Taint{{Key: "a", Effect: "Never"}} }, "Unsupported value"},
		"a taint without key":           {func(s *spec) { s.Node.Taints = &[]bootstrapv1.Taint{{Effect: corev1.TaintEffectNoExecute}} }, "key"},
		"no taints at all":              {func(s *spec) { s.Node.Taints = &[]bootstrapv1.Taint{} }, ""},
		"a label":                       {label("disk"), ""},
		"a label of the user's":         {label("example.com/disk"), ""},
		"a label that kubelets may set": {label("topology.kubernetes.io/zone"), ""},
		"a role as label":               {label("node-role.kubernetes.io/worker"), "refuses this label from a kubelet"},
		"a restricted label":            {label("node-restriction.kubernetes.io/x"), "refuses this label from a kubelet"},
		"a malformed label":             {label("a b"), "spec"},
	}
}

func componentRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	kubelet := func(patch string) func(*spec) {
		return func(s *spec) { s.Kubelet.Configuration.Raw = []byte(patch) }
	}
	environment := func(variables ...bootstrapv1.EnvVar) func(*spec) {
		return func(s *spec) { s.Kubelet.Env = variables }
	}
	apiServer := func(change func(*bootstrapv1.APIServerSpec)) func(*spec) {
		return func(s *spec) { s.Role = bootstrapv1.RoleControlPlane; change(&s.Cluster.APIServer) }
	}
	arg := func(name, value string) []bootstrapv1.Arg { return []bootstrapv1.Arg{{Name: name, Value: value}} }
	return rules{
		"an argument with a NUL": {func(s *spec) { s.Kubelet.ExtraArgs = arg("v", "2\x00") }, "should match"},
		"an in-tree cloud":       {func(s *spec) { s.Kubelet.ExtraArgs = arg("cloud-provider", "aws") }, `kubelet.extraArgs[0]: Invalid value: cloud-provider: expected external or no value, found "aws"`},
		"an external cloud":      {func(s *spec) { s.Kubelet.ExtraArgs = arg("cloud-provider", "external") }, ""},
		"an argument for OIDC":   {apiServer(func(a *bootstrapv1.APIServerSpec) { a.ExtraArgs = arg("oidc-issuer-url", "https://a") }), "set cluster.apiServer.authentication instead"},
		"an argument of a member": {func(s *spec) {
			s.Role = bootstrapv1.RoleControlPlane
			s.Cluster.Etcd.ExtraArgs = arg("initial-cluster", "a=https://a:2380")
		}, "initial-cluster: Capstan sets it"},
		"an argument of a member as a variable": {func(s *spec) {
			s.Role = bootstrapv1.RoleControlPlane
			s.Cluster.Etcd.Env = []bootstrapv1.EnvVar{{Name: "GOGC", Value: "50"}, {Name: "ETCD_FORCE_NEW_CLUSTER", Value: "true"}}
		}, "cluster.etcd.env[1]: Invalid value: ETCD_FORCE_NEW_CLUSTER: etcd reads this variable as an argument"},
		"names of a certificate": {apiServer(func(a *bootstrapv1.APIServerSpec) {
			a.CertSANs = []string{"api.example.com", "*.example.com", "API_1", "192.0.2.7", "2001:db8::1"}
		}), ""},
		"a URL as name of a certificate": {apiServer(func(a *bootstrapv1.APIServerSpec) { a.CertSANs = []string{"https://api.example.com"} }), ""},
		"a name with another script":     {apiServer(func(a *bootstrapv1.APIServerSpec) { a.CertSANs = []string{"bücher.example.com"} }), "expected ASCII characters"},
		"an argument with dashes":        {func(s *spec) { s.Kubelet.ExtraArgs = []bootstrapv1.Arg{{Name: "--v", Value: "2"}} }, "should match"},
		"an argument without value":      {func(s *spec) { s.Kubelet.ExtraArgs = []bootstrapv1.Arg{{Name: "v"}} }, ""},
		"the kubelet's configuration":    {kubelet(`{"maxPods":60,"evictionHard":{"memory.available":"1Gi"}}`), ""},
		"an unknown field":               {kubelet(`{"maxPod":60}`), `unknown field "maxPod"`},
		"a field of Capstan":             {kubelet(`{"authorization":{"mode":"AlwaysAllow"}}`), "authorization: Capstan sets this field"},
		"a field in capitals":            {kubelet(`{"StaticPodPath":"/x"}`), `unknown field "StaticPodPath"`},
		"a long configuration":           {kubelet(`{"clusterDNS":["` + strings.Repeat("x", 20000) + `"]}`), "expected at most 16384"},
		"kube-proxy's configuration":     {func(s *spec) { s.KubeProxy.Configuration.Raw = []byte(`{"nftables":{"syncPeriod":"1m"}}`) }, ""},
		"kube-proxy's mode":              {func(s *spec) { s.KubeProxy.Configuration.Raw = []byte(`{"mode":"iptables"}`) }, "mode: Capstan sets this field"},
		"variables":                      {environment(bootstrapv1.EnvVar{Name: "GOGC", Value: "50"}, bootstrapv1.EnvVar{Name: "GODEBUG"}), ""},
		"a variable with =":              {environment(bootstrapv1.EnvVar{Name: "A=B", Value: "1"}), "should match"},
		"a variable with a NUL":          {environment(bootstrapv1.EnvVar{Name: "A", Value: "1\x002"}), "should match"},
		"a variable without name":        {environment(bootstrapv1.EnvVar{Value: "1"}), "name"},
		"a variable twice":               {environment(bootstrapv1.EnvVar{Name: "A", Value: "1"}, bootstrapv1.EnvVar{Name: "A", Value: "2"}), "Duplicate value"},
		"a long variable":                {environment(bootstrapv1.EnvVar{Name: "A", Value: strings.Repeat("x", 5000)}), "may not be more than 4096"},
		"variables of an external etcd": {func(s *spec) {
			s.Role = bootstrapv1.RoleControlPlane
			s.Cluster.Etcd = bootstrapv1.EtcdSpec{Env: []bootstrapv1.EnvVar{{Name: "A"}}, External: bootstrapv1.ExternalEtcdSpec{Endpoints: []string{"https://etcd"}}}
		}, "env cannot be set together with external"},
	}
}

func fileRules(t *testing.T) rules {
	t.Helper()
	type spec = bootstrapv1.CapstanConfigSpec
	file := func(change func(*bootstrapv1.File)) func(*spec) {
		return func(s *spec) {
			f := bootstrapv1.File{Path: "/etc/x", Content: "x"}
			change(&f)
			s.Files = []bootstrapv1.File{f}
		}
	}
	return rules{
		"a relative path":   {file(func(f *bootstrapv1.File) { f.Path = "etc/x" }), "should match"},
		"a path with ..":    {file(func(f *bootstrapv1.File) { f.Path = "/etc/../x" }), `files[0]: Invalid value: path "/etc/../x" is not in its shortest form: write "/x"`},
		"a folder":          {file(func(f *bootstrapv1.File) { f.Path = "/etc/x/" }), "is not in its shortest form"},
		"Capstan's own":     {file(func(f *bootstrapv1.File) { f.Path = "/etc/capstan/node.yaml" }), "which only Capstan writes"},
		"a path in lines":   {file(func(f *bootstrapv1.File) { f.Path = "/etc/x\ny" }), "contains a line break"},
		"a path with a tab": {file(func(f *bootstrapv1.File) { f.Path = "/etc/x\ty" }), ""},
		"a long name":       {file(func(f *bootstrapv1.File) { f.Path = "/etc/" + strings.Repeat("x", 243) }), "expected at most 255 bytes for the name of a folder, and 242 for that of the file"},
		"longest names":     {file(func(f *bootstrapv1.File) { f.Path = "/" + strings.Repeat("x", 255) + "/" + strings.Repeat("x", 242) }), ""},
		"a long folder":     {file(func(f *bootstrapv1.File) { f.Path = "/" + strings.Repeat("x", 256) + "/x" }), "expected at most 255 bytes"},
		"an owner":          {file(func(f *bootstrapv1.File) { f.Owner = "ann:1000" }), ""},
		"another owner":     {file(func(f *bootstrapv1.File) { f.Owner = `LAB\ann$` }), ""},
		"only a group":      {file(func(f *bootstrapv1.File) { f.Owner = ":staff" }), ""},
		"three owners":      {file(func(f *bootstrapv1.File) { f.Owner = "a:b:c" }), "expected user or user:group"},
		"a spaced owner":    {file(func(f *bootstrapv1.File) { f.Owner = "ann staff" }), "expected user or user:group"},
		"no base64":         {file(func(f *bootstrapv1.File) { f.Content, f.Encoding = "%", bootstrapv1.EncodingBase64 }), "content: is not base64, but the encoding of /etc/x is base64"},
		"text as gzip":      {file(func(f *bootstrapv1.File) { f.Encoding = bootstrapv1.EncodingGzip }), "content: is not gzip"},
		"damaged gzip":      {file(func(f *bootstrapv1.File) { f.Content, f.Encoding = zeros(t, 10)[:20], bootstrapv1.EncodingGzipBase64 }), "content: is damaged gzip"},
		"gzip":              {file(func(f *bootstrapv1.File) { f.Content, f.Encoding = zeros(t, 10), bootstrapv1.EncodingGzipBase64 }), ""},
		"much gzip":         {file(func(f *bootstrapv1.File) { f.Content, f.Encoding = zeros(t, 64<<20+1), bootstrapv1.EncodingGzipBase64 }), "files[0]: Invalid value: the content of /etc/x has more than 64 MiB unpacked"},
		"permissions":       {file(func(f *bootstrapv1.File) { f.Permissions = "0999" }), "should match"},
		"an encoding":       {file(func(f *bootstrapv1.File) { f.Encoding = "rot13" }), "Unsupported value"},
		"content twice":     {file(func(f *bootstrapv1.File) { f.ContentFrom.Secret = bootstrapv1.SecretKeyReference{Name: "a", Key: "b"} }), "cannot be used together"},
		"a file of a ConfigMap": {file(func(f *bootstrapv1.File) {
			f.Content, f.ContentFrom = "", bootstrapv1.ContentSource{ConfigMap: bootstrapv1.ConfigMapKeyReference{Name: "a", Key: "b"}}
		}), ""},
	}
}

// TestWarnings: a machine starts with these settings, so configs and templates only get a warning.
func TestWarnings(t *testing.T) {
	path := func(path string) bootstrapv1.CapstanConfigSpec {
		return bootstrapv1.CapstanConfigSpec{Files: []bootstrapv1.File{{Path: path}}}
	}
	names := func(names ...string) (s bootstrapv1.CapstanConfigSpec) {
		s.Cluster.APIServer.CertSANs = names
		return s
	}
	twoFiles := func(size int) (s bootstrapv1.CapstanConfigSpec) {
		f := bootstrapv1.File{Content: zeros(t, size), Encoding: bootstrapv1.EncodingGzipBase64}
		for _, f.Path = range []string{"/a", "/b"} {
			s.Files = append(s.Files, f)
		}
		return s
	}
	for name, c := range map[string]struct {
		spec bootstrapv1.CapstanConfigSpec
		want string
	}{
		"a path with a tab":   {path("/etc/x\ty"), "files[0].path contains a control character"},
		"a path with a space": {path("/etc/x y"), ""},
		"a URL in certSANs":   {names("a", "https://api.example.com"), "certSANs[1] has no effect: expected a DNS name"},
		"names and addresses": {names("api.example.com", "*.example.com", "API_1", "192.0.2.7", "2001:db8::1"), ""},
		"64 MiB in two files": {twoFiles(32 << 20), ""},
		"80 MiB in two files": {twoFiles(40 << 20), "files: only the first 64 MiB of the unpacked content were checked"},
	} {
		config, template := &bootstrapv1.CapstanConfig{Spec: c.spec}, &bootstrapv1.CapstanConfigTemplate{}
		template.Spec.Template.Spec = c.spec
		created, err := webhook{}.ValidateCreate(t.Context(), config)
		changed, changeErr := webhook{}.ValidateUpdate(t.Context(), &bootstrapv1.CapstanConfig{}, config)
		ofTemplate, templateErr := templateWebhook{}.ValidateCreate(t.Context(), template)
		if err := errors.Join(err, changeErr, templateErr); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, got := range []admission.Warnings{created, changed, ofTemplate} {
			if all := strings.Join(got, "; "); (c.want == "") != (all == "") || !strings.Contains(all, c.want) {
				t.Errorf("%s: %q", name, all)
			}
		}
	}
}

// zeros returns zeros with gzip and base64.
func zeros(t *testing.T, size int) string {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, err := w.Write(make([]byte, size))
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return base64.StdEncoding.EncodeToString(out.Bytes())
}

func registryRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	registry := func(change func(*bootstrapv1.Registry)) func(*spec) {
		return func(s *spec) {
			r := bootstrapv1.Registry{Host: "docker.io"}
			change(&r)
			s.Registries = []bootstrapv1.Registry{r}
		}
	}
	configMap := bootstrapv1.ContentSource{ConfigMap: bootstrapv1.ConfigMapKeyReference{Name: "a", Key: "b"}}
	both := configMap
	both.Secret = bootstrapv1.SecretKeyReference{Name: "a", Key: "b"}
	return rules{
		"a mirror that is no URL":   {registry(func(r *bootstrapv1.Registry) { r.Mirrors = []string{"mirror.example.com"} }), "should match"},
		"a registry as URL":         {registry(func(r *bootstrapv1.Registry) { r.Host, r.Mirrors = "https://docker.io", []string{"https://a"} }), "should match"},
		"all other registries":      {registry(func(r *bootstrapv1.Registry) { r.Host, r.Mirrors = "_default", []string{"https://a"} }), ""},
		"a registry without effect": {registry(func(*bootstrapv1.Registry) {}), "has no effect"},
		"others without mirrors":    {registry(func(r *bootstrapv1.Registry) { r.Host, r.Credentials.Name = "_default", "a" }), "the registry _default needs mirrors"},
		"credentials over http":     {registry(func(r *bootstrapv1.Registry) { r.Mirrors, r.Credentials.Name = []string{"http://a"}, "s" }), "would cross the network unencrypted"},
		"credentials in a mirror":   {registry(func(r *bootstrapv1.Registry) { r.Mirrors = []string{"https://me:hunter2@a"} }), "name a Secret in credentials"},
		"a mirror with a query":     {registry(func(r *bootstrapv1.Registry) { r.Mirrors = []string{"https://a?b"} }), "expected URLs of mirrors"},
		"a mirror with a quote":     {registry(func(r *bootstrapv1.Registry) { r.Mirrors = []string{"https://a/\"]\n"} }), "expected URLs of mirrors"},
		"a mirror with a path":      {registry(func(r *bootstrapv1.Registry) { r.Mirrors = []string{"https://a.example.com:5000/docker"} }), ""},
		"the path of a mirror": {registry(func(r *bootstrapv1.Registry) {
			r.Mirrors, r.OverridePath = []string{"https://a.example.com/docker/v2"}, ptr.To(true)
		}), ""},
		"a mirror without its path": {registry(func(r *bootstrapv1.Registry) {
			r.Mirrors, r.OverridePath = []string{"https://a.example.com/"}, ptr.To(true)
		}), "every mirror must have the path of its API"},
		"an authority that is none":   {registry(func(r *bootstrapv1.Registry) { r.CA.Content = "hunter2" }), "expected certificates as PEM"},
		"an authority twice":          {registry(func(r *bootstrapv1.Registry) { r.CA = bootstrapv1.Document{Content: "x", ContentFrom: configMap} }), "exactly one of content"},
		"an authority from two":       {registry(func(r *bootstrapv1.Registry) { r.CA.ContentFrom = both }), "exactly one of secret and configMap"},
		"an authority of a ConfigMap": {registry(func(r *bootstrapv1.Registry) { r.CA.ContentFrom = configMap }), ""},
		"an authority without key":    {registry(func(r *bootstrapv1.Registry) { r.CA.ContentFrom.Secret.Name = "a" }), "key"},
	}
}

func userRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	user := func(change func(*bootstrapv1.User)) func(*spec) {
		return func(s *spec) {
			u := bootstrapv1.User{Name: "ann"}
			change(&u)
			s.Users = []bootstrapv1.User{u}
		}
	}
	key := "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB"
	return rules{
		"a user": {user(func(u *bootstrapv1.User) {
			*u = bootstrapv1.User{Name: "ann_b-1", Gecos: "Ann Bäcker", PrimaryGroup: "staff", Groups: []string{"adm", "www-data"}, HomeDir: "/srv/ann.b", Shell: "/bin/bash",
				PasswdFrom: bootstrapv1.PasswdSource{Secret: bootstrapv1.SecretKeyReference{Name: "a", Key: "b"}}, LockPassword: ptr.To(false), Sudo: "ALL=(ALL) NOPASSWD:ALL",
				SSHAuthorizedKeys: []string{key, `from="10.0.0.0/8",no-pty ` + key + " ann@example.com", "sk-ssh-ed25519@openssh.com AAAAGnNrLXNz= x", "ecdsa-sha2-nistp256 AAAAE2Vj=="}}
		}), ""},
		"root as user":             {user(func(u *bootstrapv1.User) { u.Name = "root" }), "found a name of a system account"},
		"etcd as user":             {user(func(u *bootstrapv1.User) { u.Name = "etcd" }), "found a name of a system account"},
		"a component as user":      {user(func(u *bootstrapv1.User) { u.Name = "kube-apiserver" }), "found a name of a system account"},
		"a user of systemd":        {user(func(u *bootstrapv1.User) { u.Name = "systemd-resolve" }), "found a name of a system account"},
		"a user with a colon":      {user(func(u *bootstrapv1.User) { u.Name = "a:b" }), "expected a name with lower case letters"},
		"a user with two lines":    {user(func(u *bootstrapv1.User) { u.Name = "a\nb" }), "expected a name with lower case letters"},
		"a user as option":         {user(func(u *bootstrapv1.User) { u.Name = "-b" }), "expected a name with lower case letters"},
		"a user without a name":    {user(func(u *bootstrapv1.User) { u.Name = "" }), "name"},
		"a long user":              {user(func(u *bootstrapv1.User) { u.Name = strings.Repeat("a", 33) }), "may not be more than 32"},
		"a user twice":             {func(s *spec) { s.Users = []bootstrapv1.User{{Name: "ann"}, {Name: "ann"}} }, "Duplicate value"},
		"17 users":                 {func(s *spec) { s.Users = manyUsers(17) }, "must have at most 16 items"},
		"a description of 2 parts": {user(func(u *bootstrapv1.User) { u.Gecos = "Ann:/root" }), "expected a text without"},
		"a description of 2 lines": {user(func(u *bootstrapv1.User) { u.Gecos = "Ann\nbob" }), "expected a text without"},
		"a group with a comma":     {user(func(u *bootstrapv1.User) { u.Groups = []string{"a,b"} }), "expected names with lower case"},
		"a primary group as text":  {user(func(u *bootstrapv1.User) { u.PrimaryGroup = "Staff of x" }), "expected a name with lower case letters"},
		"a relative home":          {user(func(u *bootstrapv1.User) { u.HomeDir = "home/ann" }), "expected an absolute path"},
		"a home outside":           {user(func(u *bootstrapv1.User) { u.HomeDir = "/home/../etc" }), "expected an absolute path"},
		"a home with a colon":      {user(func(u *bootstrapv1.User) { u.HomeDir = "/home/ann:/x" }), "expected an absolute path"},
		"a shell with arguments":   {user(func(u *bootstrapv1.User) { u.Shell = "/bin/sh -x" }), "expected the absolute path of a program"},
		"a source without a key":   {user(func(u *bootstrapv1.User) { u.PasswdFrom.Secret.Name = "a" }), "key"},
		"a rule without effect":    {user(func(u *bootstrapv1.User) { u.Sudo = "yes" }), "expected one rule of sudoers"},
		"two rules":                {user(func(u *bootstrapv1.User) { u.Sudo = "ALL=ALL\nbob ALL=ALL" }), "expected one rule of sudoers"},
		"a rule that goes on":      {user(func(u *bootstrapv1.User) { u.Sudo = "ALL=ALL\\" }), "expected one rule of sudoers"},
		"no public key":            {user(func(u *bootstrapv1.User) { u.SSHAuthorizedKeys = []string{"hunter2hunter2hunter2"} }), "expected lines of authorized_keys"},
		"two keys in one":          {user(func(u *bootstrapv1.User) { u.SSHAuthorizedKeys = []string{key + "\n" + key} }), "expected lines of authorized_keys"},
		"a private key":            {user(func(u *bootstrapv1.User) { u.SSHAuthorizedKeys = []string{"-----BEGIN OPENSSH PRIVATE KEY-----"} }), "expected lines of authorized_keys"},
		"a long key":               {user(func(u *bootstrapv1.User) { u.SSHAuthorizedKeys = []string{key + strings.Repeat("A", 4096)} }), "may not be more than 4096"},
		"11 keys":                  {user(func(u *bootstrapv1.User) { u.SSHAuthorizedKeys = manyKeys(key, 11) }), "must have at most 10 items"},
	}
}

func imageRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	return rules{
		"images": {func(s *spec) {
			s.Images = []string{"a.test:5000/team/app:v1", "docker.io/a/b@sha256:" + strings.Repeat("0", 64)}
		}, ""},
		"an image without a tag":      {func(s *spec) { s.Images = []string{"a.test/app"} }, "expected the full names of images"},
		"an image without a registry": {func(s *spec) { s.Images = []string{"nginx:v1"} }, "expected the full names of images"},
		"an image with an option":     {func(s *spec) { s.Images = []string{"a.test/app:v1 --x"} }, "expected the full names of images"},
		"an image twice":              {func(s *spec) { s.Images = []string{"a.test/app:v1", "a.test/app:v1"} }, "Duplicate value"},
		"51 images":                   {func(s *spec) { s.Images = numbered(51) }, "must have at most 50 items"},
	}
}

func proxyRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	proxy := func(p bootstrapv1.ProxySpec) func(*spec) { return func(s *spec) { s.Proxy = p } }
	return rules{
		"a proxy":                    {proxy(bootstrapv1.ProxySpec{HTTP: "http://proxy.example.com:3128", HTTPS: "http://10.0.0.1:3128", NoProxy: []string{".example.com", "10.0.0.0/8", "fd00::1"}}), ""},
		"a proxy that is no URL":     {proxy(bootstrapv1.ProxySpec{HTTP: "proxy.example.com:3128"}), "expected the URL of a proxy"},
		"a proxy of another scheme":  {proxy(bootstrapv1.ProxySpec{HTTPS: "socks5://proxy:1080"}), "expected the URL of a proxy"},
		"a proxy with a path":        {proxy(bootstrapv1.ProxySpec{HTTPS: "http://proxy:1080/x"}), "expected the URL of a proxy"},
		"credentials of a proxy":     {proxy(bootstrapv1.ProxySpec{HTTPS: "http://me:hunter2@proxy:1080"}), "must not contain credentials"},
		"exceptions without a proxy": {proxy(bootstrapv1.ProxySpec{NoProxy: []string{"a"}}), "http or https must be set"},
		"exceptions that are URLs":   {proxy(bootstrapv1.ProxySpec{HTTP: "http://proxy:1", NoProxy: []string{"http://a"}}), "expected a host, a domain"},
		"two exceptions in one":      {proxy(bootstrapv1.ProxySpec{HTTP: "http://proxy:1", NoProxy: []string{"a,b"}}), "should match"},
	}
}

func dnsRules() rules {
	type spec = bootstrapv1.CapstanConfigSpec
	dns := func(c bootstrapv1.CoreDNSSpec) func(*spec) {
		return func(s *spec) { s.Role, s.Cluster.CoreDNS = bootstrapv1.RoleControlPlane, c }
	}
	return rules{
		"DNS":                           {dns(bootstrapv1.CoreDNSSpec{Upstreams: []string{"10.0.0.1", "[fd00::53]:5353"}, StubDomains: []bootstrapv1.StubDomain{{Domain: "corp", Servers: []string{"10.0.0.2:53"}}}}), ""},
		"a name as DNS server":          {dns(bootstrapv1.CoreDNSSpec{Upstreams: []string{"dns.example.com"}}), "should match"},
		"half an address":               {dns(bootstrapv1.CoreDNSSpec{Upstreams: []string{"10.0.0"}}), "expected the address of a DNS server"},
		"a stub domain in capitals":     {dns(bootstrapv1.CoreDNSSpec{StubDomains: []bootstrapv1.StubDomain{{Domain: "Corp", Servers: []string{"10.0.0.2"}}}}), "should match"},
		"a block as stub domain":        {dns(bootstrapv1.CoreDNSSpec{StubDomains: []bootstrapv1.StubDomain{{Domain: "a {\n}", Servers: []string{"10.0.0.2"}}}}), "should match"},
		"a stub domain without servers": {dns(bootstrapv1.CoreDNSSpec{StubDomains: []bootstrapv1.StubDomain{{Domain: "corp"}}}), "servers"},
		"options of no DNS": {func(s *spec) {
			s.Role = bootstrapv1.RoleControlPlane
			s.Cluster = bootstrapv1.ClusterConfiguration{DNS: bootstrapv1.DNSNone, CoreDNS: bootstrapv1.CoreDNSSpec{Upstreams: []string{"10.0.0.1"}}}
		}, "coreDNS cannot be set with dns None"},
	}
}

// TestTemplateImmutable (ALL-10, BC-01): templates cannot change in any version, except in a dry run of the topology controller.
func TestTemplateImmutable(t *testing.T) {
	ctx := context.Background()
	obj := &bootstrapv1.CapstanConfigTemplate{}
	obj.Namespace, obj.Name = env.Namespace(t), "demo"
	obj.Spec.Template.Spec.PreCommands = []string{"one"}
	if err := env.Client.Create(ctx, obj); err != nil {
		t.Fatal(err)
	}
	obj.Labels = map[string]string{"a": "b"}
	testenv.Refused(t, env.Client.Update(ctx, obj), "")
	obj.Spec.Template.Spec.PreCommands = []string{"two"}
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy()), "a template cannot be changed")
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy(), client.DryRunAll), "a template cannot be changed")
	obj.Annotations = map[string]string{clusterv1.TopologyDryRunAnnotation: ""}
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy(), client.DryRunAll), "")
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy()), "a template cannot be changed")
	former := &bootstrapv1beta1.CapstanConfigTemplate{}
	if err := env.Client.Get(ctx, client.ObjectKeyFromObject(obj), former); err != nil {
		t.Fatal(err)
	}
	former.Spec.Template.Spec.PreCommands = []string{"two"}
	testenv.Refused(t, env.Client.Update(ctx, former), "a template cannot be changed")
	named := &bootstrapv1.CapstanConfigTemplate{}
	named.Namespace, named.Name = obj.Namespace, "named"
	named.Spec.Template.Spec.Node.Name = "one"
	testenv.Refused(t, env.Client.Create(ctx, named), "needs its own name")
	labelled := &bootstrapv1.CapstanConfigTemplate{}
	labelled.Namespace, labelled.Name = obj.Namespace, "labelled"
	labelled.Spec.Template.ObjectMeta.Labels = map[string]string{"a": "a b"}
	testenv.Refused(t, env.Client.Create(ctx, labelled), "spec.template.metadata.labels")
}

// TestAdmittedByFormerVersions: a config of a former version can violate rules of this version. Cluster API still writes its owner
// references and annotations. A change of its spec must correct it.
func TestAdmittedByFormerVersions(t *testing.T) {
	before := &bootstrapv1.CapstanConfig{}
	before.Spec.Node.Labels = map[string]string{"kubernetes.io/role": "x"}
	after := before.DeepCopy()
	after.Annotations = map[string]string{clusterv1.PausedAnnotation: ""}
	_, err := webhook{}.ValidateUpdate(context.Background(), before, after)
	testenv.Refused(t, err, "")
	after.Spec.PreCommands = []string{"true"}
	_, err = webhook{}.ValidateUpdate(context.Background(), before, after)
	testenv.Refused(t, err, "spec.node.labels")
}

func numbered(count int) (names []string) {
	for i := range count {
		names = append(names, fmt.Sprintf("a.test/app:v%d", i))
	}
	return names
}

func manyUsers(n int) (out []bootstrapv1.User) {
	for i := range n {
		out = append(out, bootstrapv1.User{Name: fmt.Sprintf("user%d", i)})
	}
	return out
}

func manyKeys(key string, n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("%s %d", key, i))
	}
	return out
}
