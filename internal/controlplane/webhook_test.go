package controlplane

import (
	"context"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	etcdv1 "capstan.dev/capstan/api/etcd/v1beta2"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/testenv"
)

func newControlPlane(t *testing.T, change func(*controlplanev1.CapstanControlPlane)) *controlplanev1.CapstanControlPlane {
	t.Helper()
	cp := &controlplanev1.CapstanControlPlane{}
	cp.Namespace, cp.GenerateName = env.Namespace(t), "demo-"
	cp.Spec.Version = "v1.36.3"
	cp.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{
		APIGroup: infrav1.GroupVersion.Group, Kind: "CapstanMachineTemplate", Name: "demo",
	}
	if change != nil {
		change(cp)
	}
	return cp
}

// TestDefaults (CP-03, CP-05).
func TestDefaults(t *testing.T) {
	cp := newControlPlane(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Version = "1.36.3" })
	if err := env.Client.Create(context.Background(), cp); err != nil {
		t.Fatal(err)
	}
	if ptr.Deref(cp.Spec.Replicas, 0) != 1 || cp.Spec.Version != "v1.36.3" ||
		cp.Spec.Rollout.Strategy.Type != controlplanev1.RollingUpdateStrategyType || cp.Spec.Rollout.Strategy.RollingUpdate.MaxSurge.IntValue() != 1 {
		t.Errorf("got %v", cp.Spec)
	}
}

// TestVersionWithoutV_CP05: a client can apply a manifest whose version has no v again and again, also without storing it. Nothing changes,
// and the topology controller, which writes the v, finds no difference.
func TestVersionWithoutV_CP05(t *testing.T) {
	ctx := context.Background()
	namespace, generation := env.Namespace(t), int64(0)
	apply := func(version, owner string, opts ...client.ApplyOption) {
		t.Helper()
		u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
			"version":         version,
			"machineTemplate": map[string]any{"spec": map[string]any{"infrastructureRef": map[string]any{"apiGroup": "infrastructure.capstan.dev", "kind": "CapstanMachineTemplate", "name": "demo"}}},
		}}}
		u.SetGroupVersionKind(controlplanev1.GroupVersion.WithKind(controlplanev1.ControlPlaneKind))
		u.SetNamespace(namespace)
		u.SetName("demo")
		if err := env.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), append(opts, client.FieldOwner(owner))...); err != nil {
			t.Fatal(err)
		}
		if stored, _, _ := unstructured.NestedString(u.Object, "spec", "version"); stored != "v1.36.3" || generation != 0 && u.GetGeneration() != generation {
			t.Errorf("%s applies %s: version %s, generation %d after %d", owner, version, stored, u.GetGeneration(), generation)
		}
		generation = u.GetGeneration()
	}
	for range 2 {
		apply("1.36.3", "gitops")
		apply("1.36.3", "gitops", client.DryRunAll)
		apply("v1.36.3", "capi-topology", client.DryRunAll)
	}
}

// rule is a change of a control plane that is accepted, or refused with a message.
type rule struct {
	change func(*controlplanev1.CapstanControlPlane)
	want   string // empty: accepted
}

type rules map[string]rule

// TestCreateRules (CP-03, CP-05, CP-06, CP-14) checks the rules of the CRD and the webhook for new objects.
func TestCreateRules(t *testing.T) {
	for _, all := range []rules{replicaRules(), machineRules(), clusterRules(), certificateRules(), manifestRules(), storeRules()} {
		checkRules(t, all)
	}
}

func checkRules(t *testing.T, all rules) {
	t.Helper()
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			obj := newControlPlane(t, c.change)
			testenv.Refused(t, env.Client.Create(context.Background(), obj, client.DryRunAll), c.want)
		})
	}
}

func replicaRules() rules {
	type cp = controlplanev1.CapstanControlPlane
	return rules{
		"plain":                {nil, ""},
		"CP-03 even replicas":  {func(o *cp) { o.Spec.Replicas = ptr.To[int32](2) }, "replicas must be odd"},
		"CP-03 three replicas": {func(o *cp) { o.Spec.Replicas = ptr.To[int32](3) }, ""},
		"CP-03 even replicas, external etcd": {func(o *cp) {
			o.Spec.Replicas = ptr.To[int32](2)
			o.Spec.Config.Cluster.Etcd.External.Endpoints = []string{"https://etcd:2379"}
		}, ""},
		"CP-03 no replicas":         {func(o *cp) { o.Spec.Replicas = ptr.To[int32](0) }, "greater than or equal to 1"},
		"CP-05 no version":          {func(o *cp) { o.Spec.Version = "" }, "spec.version"},
		"CP-05 a malformed version": {func(o *cp) { o.Spec.Version = "v1.36" }, "is not a Kubernetes version"},
		"strategy":                  {func(o *cp) { o.Spec.Rollout.Strategy.Type = "Recreate" }, "Unsupported value"},
		"maxSurge 2":                {func(o *cp) { o.Spec.Rollout.Strategy.RollingUpdate.MaxSurge = ptr.To(intstr.FromInt32(2)) }, "maxSurge must be 0 or 1"},
		"maxSurge 0, one replica":   {func(o *cp) { o.Spec.Rollout.Strategy.RollingUpdate.MaxSurge = ptr.To(intstr.FromInt32(0)) }, "three replicas"},
	}
}

func machineRules() rules {
	type cp = controlplanev1.CapstanControlPlane
	return rules{
		"CP-06 no template": {func(o *cp) {
			o.Spec.MachineTemplate.Spec.InfrastructureRef = clusterv1.ContractVersionedObjectReference{}
		}, "spec.machineTemplate"},
		"CP-06 negative timeout":    {func(o *cp) { o.Spec.MachineTemplate.Spec.Deletion.NodeDrainTimeoutSeconds = ptr.To[int32](-1) }, "greater than or equal to 0"},
		"a role":                    {func(o *cp) { o.Spec.Config.Role = bootstrapv1.RoleInit }, "config.role is set by"},
		"a node name":               {func(o *cp) { o.Spec.Config.Node.Name = "me" }, "config.node.name cannot be set"},
		"CP-06 a label":             {func(o *cp) { o.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"a": "a b"} }, "spec.machineTemplate.metadata.labels"},
		"CP-06 an annotation":       {func(o *cp) { o.Spec.MachineTemplate.ObjectMeta.Annotations = map[string]string{"a b": ""} }, "spec.machineTemplate.metadata.annotations"},
		"naming without random":     {func(o *cp) { o.Spec.MachineNaming.Template = "{{ .cluster.name }}" }, "must contain {{ .random }}"},
		"naming that is malformed":  {func(o *cp) { o.Spec.MachineNaming.Template = "{{ .random" }, "cannot be read"},
		"naming that loops":         {func(o *cp) { o.Spec.MachineNaming.Template = "{{range 9000000000000000000}}{{end}}{{ .random }}" }, "only text and"},
		"naming that doubles":       {func(o *cp) { o.Spec.MachineNaming.Template = `{{define "a"}}{{.}}{{.}}{{end}}{{template "a" .random}}` }, "found a definition"},
		"naming with random unused": {func(o *cp) { o.Spec.MachineNaming.Template = "{{/* .random */}}x" }, "must contain {{ .random }}"},
		"naming":                    {func(o *cp) { o.Spec.MachineNaming.Template = "{{ .cluster.name }}-{{ .random }}" }, ""},
		"the kubelet's authorization": {func(o *cp) {
			o.Spec.Config.Kubelet.Configuration.Raw = []byte(`{"authorization":{"mode":"AlwaysAllow"}}`)
		}, "spec.config.kubelet.configuration: Invalid value: authorization: Capstan sets this field"},
		"a label that a kubelet may not set": {func(o *cp) { o.Spec.Config.Node.Labels = map[string]string{"node-role.kubernetes.io/x": ""} }, "refuses this label from a kubelet"},
	}
}

func clusterRules() rules {
	type cp = controlplanev1.CapstanControlPlane
	return rules{
		"etcd twice": {func(o *cp) {
			o.Spec.Config.Cluster.Etcd = bootstrapv1.EtcdSpec{ExtraArgs: []bootstrapv1.Arg{{Name: "v"}}, External: bootstrapv1.ExternalEtcdSpec{Endpoints: []string{"https://etcd:2379"}}}
		}, "cannot be set together with external"},
		"etcd without TLS": {func(o *cp) { o.Spec.Config.Cluster.Etcd.External.Endpoints = []string{"http://etcd:2379"} }, "should match"},
		"encryption: all of it and a part": {func(o *cp) {
			o.Spec.Config.Cluster.Encryption = bootstrapv1.EncryptionSpec{Mode: bootstrapv1.EncryptionSecretBox, Configuration: bootstrapv1.EncryptionConfigurationSource{Secret: bootstrapv1.SecretKeyReference{Name: "a", Key: "b"}}}
		}, "cannot be set together with mode or resources"},
		"encryption: nothing, of something": {func(o *cp) {
			o.Spec.Config.Cluster.Encryption = bootstrapv1.EncryptionSpec{Mode: bootstrapv1.EncryptionNone, Resources: []string{"secrets"}}
		}, "resources cannot be set with mode None"},
		"audit policy twice": {func(o *cp) {
			o.Spec.Config.Cluster.APIServer.AuditPolicy = bootstrapv1.Document{Content: "x", ContentFrom: bootstrapv1.ContentSource{Secret: bootstrapv1.SecretKeyReference{Name: "a", Key: "b"}}}
		}, "exactly one of content and contentFrom"},
		"audit policy of another kind": {func(o *cp) { o.Spec.Config.Cluster.APIServer.AuditPolicy.Content = "apiVersion: v1\nkind: Pod" }, "audit.k8s.io"},
		"audit policy": {func(o *cp) {
			o.Spec.Config.Cluster.APIServer.AuditPolicy.Content = "apiVersion: audit.k8s.io/v1\nkind: Policy"
		}, ""},
		"authentication of another kind": {func(o *cp) { o.Spec.Config.Cluster.APIServer.Authentication.Content = "{" }, "AuthenticationConfiguration"},
		"DNS for a cluster without it": {func(o *cp) {
			o.Spec.Config.Cluster = bootstrapv1.ClusterConfiguration{DNS: bootstrapv1.DNSNone, CoreDNS: bootstrapv1.CoreDNSSpec{Upstreams: []string{"10.0.0.1"}}}
		}, "coreDNS cannot be set with dns None"},
	}
}

func certificateRules() rules {
	type cp = controlplanev1.CapstanControlPlane
	return rules{
		"certificatesExpiryDays":                   {func(o *cp) { o.Spec.Rollout.Before.CertificatesExpiryDays = 6 }, "greater than or equal to 7"},
		"certificatesExpiryDays, default validity": {func(o *cp) { o.Spec.Rollout.Before.CertificatesExpiryDays = 365 }, "must be less than config.cluster.certificateValidityDays"},
		"certificatesExpiryDays, short validity": {func(o *cp) {
			o.Spec.Rollout.Before.CertificatesExpiryDays, o.Spec.Config.Cluster.CertificateValidityDays = 30, 30
		}, "must be less than config.cluster.certificateValidityDays"},
		"certificatesExpiryDays, long validity": {func(o *cp) {
			o.Spec.Rollout.Before.CertificatesExpiryDays, o.Spec.Config.Cluster.CertificateValidityDays = 400, 500
		}, ""},
		"key algorithm":          {func(o *cp) { o.Spec.Config.Cluster.EncryptionAlgorithm = "RSA-1024" }, `Unsupported value: "RSA-1024"`},
		"RSA":                    {func(o *cp) { o.Spec.Config.Cluster.EncryptionAlgorithm = "RSA-4096" }, ""},
		"short authority":        {func(o *cp) { o.Spec.Config.Cluster.CACertificateValidityDays = 365 }, "caCertificateValidityDays must be more than certificateValidityDays"},
		"authority of a year":    {func(o *cp) { o.Spec.Config.Cluster.CACertificateValidityDays = 366 }, ""},
		"authority of 100 years": {func(o *cp) { o.Spec.Config.Cluster.CACertificateValidityDays = 36501 }, "less than or equal to 36500"},
		"authority, short leaves": {func(o *cp) {
			o.Spec.Config.Cluster.CACertificateValidityDays, o.Spec.Config.Cluster.CertificateValidityDays = 31, 30
		}, ""},
		"authority, long leaves": {func(o *cp) {
			o.Spec.Config.Cluster.CACertificateValidityDays, o.Spec.Config.Cluster.CertificateValidityDays = 400, 400
		}, "caCertificateValidityDays must be more"},
		"CP-14 renewal after the end": {func(o *cp) { o.Spec.Kubeconfig = controlplanev1.KubeconfigSpec{ValidityDays: 10, RenewBeforeDays: 10} }, "less than validityDays"},
		"CP-14 renewal, default end":  {func(o *cp) { o.Spec.Kubeconfig = controlplanev1.KubeconfigSpec{RenewBeforeDays: 400} }, "less than validityDays"},
		"CP-14 one day":               {func(o *cp) { o.Spec.Kubeconfig = controlplanev1.KubeconfigSpec{ValidityDays: 1} }, ""},
		"CP-14":                       {func(o *cp) { o.Spec.Kubeconfig = controlplanev1.KubeconfigSpec{ValidityDays: 10, RenewBeforeDays: 3} }, ""},
	}
}

func manifestRules() rules {
	type cp = controlplanev1.CapstanControlPlane
	return rules{
		"a manifest": {func(o *cp) {
			o.Spec.Manifests = []controlplanev1.Manifest{{Name: "a", Content: "apiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n"}}
		}, ""},
		"a manifest of a ConfigMap": {func(o *cp) {
			o.Spec.Manifests = []controlplanev1.Manifest{{Name: "a", ContentFrom: bootstrapv1.ContentSource{ConfigMap: bootstrapv1.ConfigMapKeyReference{Name: "a", Key: "b"}}}}
		}, ""},
		"a manifest without a source":  {func(o *cp) { o.Spec.Manifests = []controlplanev1.Manifest{{Name: "a"}} }, "exactly one of content and contentFrom"},
		"a manifest without objects":   {func(o *cp) { o.Spec.Manifests = []controlplanev1.Manifest{{Name: "a", Content: "---"}} }, "expected 1 to 200 objects"},
		"a manifest without a name":    {func(o *cp) { o.Spec.Manifests = []controlplanev1.Manifest{{Content: "a: b"}} }, "name"},
		"a manifest with another name": {func(o *cp) { o.Spec.Manifests = []controlplanev1.Manifest{{Name: "A/B", Content: "a: b"}} }, "should match"},
		"two manifests of the one name": {func(o *cp) {
			o.Spec.Manifests = []controlplanev1.Manifest{{Name: "a", Content: "a: b"}, {Name: "a", Content: "c: d"}}
		}, "Duplicate value"},
		"a long manifest": {func(o *cp) {
			o.Spec.Manifests = []controlplanev1.Manifest{{Name: "a", Content: strings.Repeat("#", 65537)}}
		}, "Too long"},
	}
}

func storeRules() rules {
	type cp = controlplanev1.CapstanControlPlane
	s3 := func(endpoint string) func(*cp) {
		return func(o *cp) {
			o.Spec.Backup.Store.S3 = etcdv1.S3Store{Endpoint: endpoint, Bucket: "backups", CredentialsSecretRef: etcdv1.BackupSecretReference{Name: "a"}}
		}
	}
	longURL := func(length int) string {
		const scheme = "https://"
		return scheme + strings.Repeat("a", length-len(scheme))
	}
	const local = "must not be a loopback or link-local address"
	return rules{
		"S3":                  {s3("https://10.1.2.3:9000"), ""},
		"S3 by name":          {s3("https://s3.example.org"), ""},
		"S3 on loopback":      {s3("http://127.0.0.1:9000"), local},
		"S3 on localhost":     {s3("http://localhost:9000"), local},
		"S3 on IPv6 loopback": {s3("http://[::1]:9000"), local},
		"S3 on any address":   {s3("http://0.0.0.0"), local},
		"S3 at the metadata":  {s3("http://169.254.169.254"), local},
		"S3 link-local":       {s3("http://[fe80::1]"), local},
		"S3, longest URL":     {s3(longURL(512)), ""},
		"S3, URL too long":    {s3(longURL(513)), "spec.backup.store.s3.endpoint: Too long"},
	}
}

// TestUpdateRules checks which fields can change.
func TestUpdateRules(t *testing.T) {
	type cp = controlplanev1.CapstanControlPlane
	all := rules{
		"CP-05 two minors": {func(o *cp) { o.Spec.Version = "v1.38.0" }, "one minor version at a time"},
		"CP-05 back":       {func(o *cp) { o.Spec.Version = "v1.35.0" }, "cannot go back"},
		"CP-05 upgrade":    {func(o *cp) { o.Spec.Version = "v1.37.0" }, ""},
		"another template": {func(o *cp) { o.Spec.MachineTemplate.Spec.InfrastructureRef.Name = "other" }, ""},
		"another config":   {func(o *cp) { o.Spec.Config.PreCommands = []string{"true"} }, ""},
		"etcd moves":       {func(o *cp) { o.Spec.Config.Cluster.Etcd.External.Endpoints = []string{"https://etcd:2379"} }, "would stay behind"},
		"CP-07 metadata":   {func(o *cp) { o.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"a": "b"} }, ""},
		"CP-07 timeouts":   {func(o *cp) { o.Spec.MachineTemplate.Spec.Deletion.NodeDrainTimeoutSeconds = ptr.To[int32](1) }, ""},
		"kubeconfig":       {func(o *cp) { o.Spec.Kubeconfig.ValidityDays = 3 }, ""},
	}
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			obj := newControlPlane(t, nil)
			if err := env.Client.Create(context.Background(), obj); err != nil {
				t.Fatal(err)
			}
			before := obj.DeepCopy()
			c.change(obj)
			testenv.Refused(t, env.Client.Patch(context.Background(), obj, client.MergeFrom(before)), c.want)
		})
	}
}

// TestRulesOfInitializedCluster: the rules for clusters with data are also valid after a move of the cluster, which loses the status.
func TestRulesOfInitializedCluster(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*controlplanev1.CapstanControlPlane)
		want   string
	}{
		"a new cluster": {func(*controlplanev1.CapstanControlPlane) {}, ""},
		"the status": {func(cp *controlplanev1.CapstanControlPlane) {
			cp.Status.Initialization.ControlPlaneInitialized = ptr.To(true)
		}, "the pod network of an existing cluster cannot change"},
		"the annotation": {func(cp *controlplanev1.CapstanControlPlane) {
			cp.Annotations = map[string]string{controlplanev1.InitializedAnnotation: "true"}
		}, "the pod network of an existing cluster cannot change"},
	} {
		t.Run(name, func(t *testing.T) {
			before := &controlplanev1.CapstanControlPlane{}
			before.Spec.Version = "v1.36.3"
			c.change(before)
			after := before.DeepCopy()
			after.Spec.Config.Cluster.PodNetwork = bootstrapv1.PodNetworkNone
			_, err := webhook{}.ValidateUpdate(t.Context(), before, after)
			testenv.Refused(t, err, c.want)
		})
	}
}

// TestUpgradeUnderWay (CP-05): while a Machine still has the former version, an upgrade by two minor versions is refused.
func TestUpgradeUnderWay(t *testing.T) {
	ctx := context.Background()
	obj := newControlPlane(t, func(cp *controlplanev1.CapstanControlPlane) { cp.Spec.Version = "v1.37.0" })
	if err := env.Client.Create(ctx, obj); err != nil {
		t.Fatal(err)
	}
	obj.Status.Versions = []clusterv1.StatusVersion{{Version: "v1.36.3", Replicas: 2}, {Version: "v1.37.0", Replicas: 1}}
	if err := env.Client.Status().Update(ctx, obj); err != nil {
		t.Fatal(err)
	}
	obj.Spec.Version = "v1.38.0"
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy()), "from v1.36.3 to a v1.37 first")
	obj.Spec.Version = "v1.37.1"
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy()), "")
}

// TestTemplateImmutable (ALL-10, CP-12): templates cannot change, except in a dry run of the topology controller.
func TestTemplateImmutable(t *testing.T) {
	obj := &controlplanev1.CapstanControlPlaneTemplate{}
	obj.Namespace, obj.Name = env.Namespace(t), "demo"
	obj.Spec.Template.Spec.Kubeconfig.ValidityDays = 10
	ctx := context.Background()
	if err := env.Client.Create(ctx, obj); err != nil {
		t.Fatal(err)
	}
	obj.Labels = map[string]string{"a": "b"}
	testenv.Refused(t, env.Client.Update(ctx, obj), "")
	obj.Spec.Template.Spec.Kubeconfig.ValidityDays = 20
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy()), "a template cannot be changed")
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy(), client.DryRunAll), "a template cannot be changed")
	obj.Annotations = map[string]string{clusterv1.TopologyDryRunAnnotation: ""}
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy(), client.DryRunAll), "")
	testenv.Refused(t, env.Client.Update(ctx, obj.DeepCopy()), "a template cannot be changed")

}

// TestTemplateRules (CP-12): a template is refused if its control planes would be invalid.
func TestTemplateRules(t *testing.T) {
	type spec = controlplanev1.CapstanControlPlaneTemplateResourceSpec
	label := clusterv1.ObjectMeta{Labels: map[string]string{"a": "a b"}}
	for name, c := range map[string]struct {
		metadata clusterv1.ObjectMeta
		spec     spec
		want     string
	}{
		"a role": {spec: spec{Config: bootstrapv1.CapstanConfigSpec{Role: bootstrapv1.RoleInit}}, want: "config.role is set by"},
		"certificatesExpiryDays": {
			spec: spec{Rollout: controlplanev1.RolloutSpec{Before: controlplanev1.RolloutBeforeSpec{CertificatesExpiryDays: 365}}},
			want: "must be less than config.cluster.certificateValidityDays",
		},
		"a manifest":          {spec: spec{Manifests: []controlplanev1.Manifest{{Name: "a", Content: "kind: Namespace"}}}, want: "spec.template.spec.manifests[0].content"},
		"a label":             {metadata: label, want: "spec.template.metadata.labels"},
		"a label of machines": {spec: spec{MachineTemplate: controlplanev1.TemplateMachineTemplate{ObjectMeta: label}}, want: "spec.template.spec.machineTemplate.metadata.labels"},
	} {
		t.Run(name, func(t *testing.T) {
			obj := &controlplanev1.CapstanControlPlaneTemplate{}
			obj.Namespace, obj.Name = env.Namespace(t), "bad"
			obj.Spec.Template.ObjectMeta, obj.Spec.Template.Spec = c.metadata, c.spec
			testenv.Refused(t, env.Client.Create(context.Background(), obj), c.want)
		})
	}
}

// TestWarnings: certificatesExpiryDays has no effect with an external etcd, and some names in certificates have none, so both kinds get a
// warning.
func TestWarnings(t *testing.T) {
	ctx, external := context.Background(), []string{"https://etcd:2379"}
	for name, c := range map[string]struct {
		days      int32
		endpoints []string
		names     []string
		want      string
	}{
		"both":              {30, external, nil, "rollout.before.certificatesExpiryDays has no effect"},
		"stacked etcd":      {30, nil, nil, ""},
		"external etcd":     {0, external, nil, ""},
		"a URL in certSANs": {0, nil, []string{"https://a"}, "config.cluster.apiServer.certSANs[0] has no effect"},
	} {
		was, obj, template := &controlplanev1.CapstanControlPlane{}, &controlplanev1.CapstanControlPlane{}, &controlplanev1.CapstanControlPlaneTemplate{}
		obj.Spec.Rollout.Before.CertificatesExpiryDays, obj.Spec.Config.Cluster.Etcd.External.Endpoints = c.days, c.endpoints
		obj.Spec.Config.Cluster.APIServer.CertSANs = c.names
		template.Spec.Template.Spec.Rollout, template.Spec.Template.Spec.Config = obj.Spec.Rollout, obj.Spec.Config
		created, _ := webhook{}.ValidateCreate(ctx, obj)
		changed, _ := webhook{}.ValidateUpdate(ctx, was, obj)
		ofTemplate, _ := templateWebhook{}.ValidateCreate(ctx, template)
		for _, got := range []admission.Warnings{created, changed, ofTemplate} {
			if all := strings.Join(got, "; "); (c.want == "") != (all == "") || !strings.Contains(all, c.want) {
				t.Errorf("%s: %q", name, all)
			}
		}
	}
}

// TestAdmittedByFormerVersions: a control plane of a former version can violate rules of this version. Its annotations can still
// change, because the provider records steps there. A change of its spec must correct it.
func TestAdmittedByFormerVersions(t *testing.T) {
	before := &controlplanev1.CapstanControlPlane{}
	before.Spec.Version = "v1.36.3"
	before.Spec.MachineTemplate.ObjectMeta.Labels = map[string]string{"a": "a b"}
	after := before.DeepCopy()
	after.Annotations = map[string]string{controlplanev1.InitializedAnnotation: "true"}
	before.Spec.Version = "1.36.3" // The webhook has added the v to the change.
	_, err := webhook{}.ValidateUpdate(context.Background(), before, after)
	testenv.Refused(t, err, "")
	after.Spec.Replicas = ptr.To[int32](3)
	_, err = webhook{}.ValidateUpdate(context.Background(), before, after)
	testenv.Refused(t, err, "spec.machineTemplate.metadata.labels")
}
