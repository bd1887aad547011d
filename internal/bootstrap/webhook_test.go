package bootstrap

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
)

func refused(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("refused: %v", err)
	case want != "" && err == nil:
		t.Errorf("accepted, want %q", want)
	case want != "" && !strings.Contains(err.Error(), want):
		t.Errorf("got %v, want %q", err, want)
	}
}

// TestRules: what the CRD and the webhook refuse, for configs and for templates alike.
func TestRules(t *testing.T) {
	namespace := env.Namespace(t)
	type spec = bootstrapv1.CapstanConfigSpec
	file := func(change func(*bootstrapv1.File)) func(*spec) {
		return func(s *spec) {
			f := bootstrapv1.File{Path: "/etc/x", Content: "x"}
			change(&f)
			s.Files = []bootstrapv1.File{f}
		}
	}
	registry := func(change func(*bootstrapv1.Registry)) func(*spec) {
		return func(s *spec) {
			r := bootstrapv1.Registry{Host: "docker.io"}
			change(&r)
			s.Registries = []bootstrapv1.Registry{r}
		}
	}
	label := func(name string) func(*spec) {
		return func(s *spec) { s.Node.Labels = map[string]string{name: "x"} }
	}
	for name, c := range map[string]struct {
		change func(*spec)
		want   string
	}{
		"plain":                         {func(s *spec) { s.PreCommands = []string{"true"} }, ""},
		"a role that is none":           {func(s *spec) { s.Role = "Boss" }, "Unsupported value"},
		"cluster settings of a worker":  {func(s *spec) { s.Role = bootstrapv1.RoleWorker; s.Cluster.DNS = bootstrapv1.DNSNone }, "cluster requires a control plane role"},
		"an argument with dashes":       {func(s *spec) { s.Kubelet.ExtraArgs = []bootstrapv1.Arg{{Name: "--v", Value: "2"}} }, "should match"},
		"an argument without value":     {func(s *spec) { s.Kubelet.ExtraArgs = []bootstrapv1.Arg{{Name: "v"}} }, ""},
		"an empty command":              {func(s *spec) { s.PreCommands = []string{""} }, "at least 1"},
		"a taint of another effect":     {func(s *spec) { s.Node.Taints = &[]bootstrapv1.Taint{{Key: "a", Effect: "Never"}} }, "Unsupported value"},
		"a taint without key":           {func(s *spec) { s.Node.Taints = &[]bootstrapv1.Taint{{Effect: corev1.TaintEffectNoExecute}} }, "key"},
		"no taints at all":              {func(s *spec) { s.Node.Taints = &[]bootstrapv1.Taint{} }, ""},
		"a label":                       {label("disk"), ""},
		"a label of the user's":         {label("example.com/disk"), ""},
		"a label that kubelets may set": {label("topology.kubernetes.io/zone"), ""},
		"a role as label":               {label("node-role.kubernetes.io/worker"), "does not let a kubelet set"},
		"a restricted label":            {label("node-restriction.kubernetes.io/x"), "does not let a kubelet set"},
		"a malformed label":             {label("a b"), "spec"},
		"a relative path":               {file(func(f *bootstrapv1.File) { f.Path = "etc/x" }), "should match"},
		"permissions":                   {file(func(f *bootstrapv1.File) { f.Permissions = "0999" }), "should match"},
		"an encoding":                   {file(func(f *bootstrapv1.File) { f.Encoding = "rot13" }), "Unsupported value"},
		"content twice":                 {file(func(f *bootstrapv1.File) { f.ContentFrom.Secret = bootstrapv1.SecretKeyReference{Name: "a", Key: "b"} }), "cannot be used together"},
		"a mirror that is no URL":       {registry(func(r *bootstrapv1.Registry) { r.Mirrors = []string{"mirror.example.com"} }), "should match"},
		"a registry as URL":             {registry(func(r *bootstrapv1.Registry) { r.Host = "https://docker.io" }), "should match"},
		"all other registries":          {registry(func(r *bootstrapv1.Registry) { r.Host = "_default" }), ""},
		"an authority without key":      {registry(func(r *bootstrapv1.Registry) { r.CA.Name = "a" }), "key"},
	} {
		t.Run(name, func(t *testing.T) {
			config := &bootstrapv1.CapstanConfig{}
			config.Namespace, config.GenerateName = namespace, "test-"
			c.change(&config.Spec)
			refused(t, env.Client.Create(context.Background(), config, client.DryRunAll), c.want)
			template := &bootstrapv1.CapstanConfigTemplate{}
			template.Namespace, template.GenerateName = namespace, "test-"
			template.Spec.Template.Spec = config.Spec
			refused(t, env.Client.Create(context.Background(), template, client.DryRunAll), c.want)
		})
	}
}

// TestTemplateImmutable (ALL-10, BC-01): no change, but the topology controller may try one out.
func TestTemplateImmutable(t *testing.T) {
	ctx := context.Background()
	obj := &bootstrapv1.CapstanConfigTemplate{}
	obj.Namespace, obj.Name = env.Namespace(t), "demo"
	obj.Spec.Template.Spec.PreCommands = []string{"one"}
	if err := env.Client.Create(ctx, obj); err != nil {
		t.Fatal(err)
	}
	obj.Labels = map[string]string{"a": "b"}
	refused(t, env.Client.Update(ctx, obj), "")
	obj.Spec.Template.Spec.PreCommands = []string{"two"}
	refused(t, env.Client.Update(ctx, obj.DeepCopy()), "a template cannot be changed")
	refused(t, env.Client.Update(ctx, obj.DeepCopy(), client.DryRunAll), "a template cannot be changed")
	obj.Annotations = map[string]string{clusterv1.TopologyDryRunAnnotation: ""}
	refused(t, env.Client.Update(ctx, obj.DeepCopy(), client.DryRunAll), "")
	refused(t, env.Client.Update(ctx, obj.DeepCopy()), "a template cannot be changed")
	named := &bootstrapv1.CapstanConfigTemplate{}
	named.Namespace, named.Name = obj.Namespace, "named"
	named.Spec.Template.Spec.Node.Name = "one"
	refused(t, env.Client.Create(ctx, named), "needs its own name")
}
