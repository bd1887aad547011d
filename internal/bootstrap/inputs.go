package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"path"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	kubeadmv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/secret"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// EncryptionSecretName is the secret with the encryption key of a cluster, in the key `value`. The
// control plane provider makes it.
func EncryptionSecretName(cluster string) string { return cluster + "-encryption" }

// notYet is why bootstrap data cannot be made yet; it becomes the DataSecretAvailable condition.
type notYet struct {
	reason, message string
	// unseen is true if no event tells when this has changed.
	unseen bool
}

func (n *notYet) Error() string { return n.message }

func waitFor(reason, format string, args ...any) error {
	return &notYet{reason: reason, message: fmt.Sprintf(format, args...)}
}

// input gathers what the bootstrap data of a config is made from. The error is a *notYet when
// something is missing or wrong that someone else has to provide.
func (r *Reconciler) input(ctx context.Context, s *scope) (render.Input, error) {
	spec := s.config.Spec
	in := render.Input{ClusterName: s.cluster.Name, Spec: spec, APIServerPort: render.APIServerPort(s.cluster)}

	var err error
	if in.Role, err = role(spec.Role, s.owner.controlPlane); err != nil {
		return in, err
	}
	if err := mayBegin(s, in.Role); err != nil {
		return in, err
	}
	settings, err := r.clusterSettings(s, in.Role)
	if err != nil {
		return in, err
	}
	if in.KubernetesVersion, err = kubernetesVersion(s); err != nil {
		return in, err
	}
	if in.Network, err = render.Network(s.cluster, settings); err != nil {
		return in, waitFor(bootstrapv1.InvalidConfigReason, "%s", err)
	}
	if in.Endpoint, err = r.endpoint(ctx, s, in.Network); err != nil {
		return in, err
	}
	if in.Certificates, err = r.certificates(ctx, s, in.Role); err != nil {
		return in, err
	}
	if in.Role != nodeconfig.RoleWorker && render.NeedsEncryptionKey(spec.Cluster.Encryption) {
		if in.EncryptionKey, err = r.encryptionKey(ctx, s.cluster); err != nil {
			return in, err
		}
	}
	if in.Secrets, err = r.references(ctx, s.config); err != nil {
		return in, err
	}
	if in.Role == nodeconfig.RoleWorker {
		if in.Token, err = newToken(); err != nil {
			return in, err
		}
	}
	return in, nil
}

// mayBegin makes sure that one machine alone begins the cluster: a manager that was stopped for long, and is no leader any
// more, may still make another one. A control plane that an older Capstan has made says nothing about its first Machine.
func mayBegin(s *scope, role nodeconfig.Role) error {
	if role != nodeconfig.RoleInit || s.controlPlane == nil || s.owner.joined {
		return nil
	}
	first := controlplanev1.GetFirstMachine(s.controlPlane)
	if first.Name == "" {
		return nil
	}
	_, begun := s.controlPlane.Annotations[controlplanev1.InitializedAnnotation]
	if first.Restore != "" {
		begun = s.controlPlane.Annotations[controlplanev1.RestoredAnnotation] == first.Restore
	}
	switch {
	case first.Name != s.config.Name:
		return waitFor(bootstrapv1.InvalidConfigReason, "spec.role is Init, and the Machine %s begins this cluster: delete this machine", first.Name)
	case begun:
		return waitFor(bootstrapv1.InvalidConfigReason, "spec.role is Init, and the cluster has begun already: delete this machine")
	}
	return nil
}

// role of the machine: what the spec says, if the Machine does not contradict.
func role(given bootstrapv1.Role, controlPlaneMachine bool) (nodeconfig.Role, error) {
	switch {
	case given == "" && controlPlaneMachine:
		return "", waitFor(bootstrapv1.InvalidConfigReason, "spec.role is empty, but this is a control plane machine: set Init on the first and ControlPlane on the others, or let a CapstanControlPlane make them")
	case given == bootstrapv1.RoleWorker && controlPlaneMachine:
		return "", waitFor(bootstrapv1.InvalidConfigReason, "spec.role is Worker, but the Machine has the label %s: set another role, or remove the label", clusterv1.MachineControlPlaneLabel)
	case given == bootstrapv1.RoleInit:
		return nodeconfig.RoleInit, nil
	case given == bootstrapv1.RoleControlPlane:
		return nodeconfig.RoleControlPlane, nil
	}
	return nodeconfig.RoleWorker, nil
}

// clusterSettings are the settings that hold for the whole cluster. A control plane machine has them
// in its own spec, a worker takes them from the CapstanControlPlane. Workers of clusters whose control
// plane is of another kind wait until it is initialized, as the contract says; those of ours need
// not: their token is made as soon as the API server answers, and capstan-init waits for it.
func (r *Reconciler) clusterSettings(s *scope, role nodeconfig.Role) (bootstrapv1.ClusterConfiguration, error) {
	if role != nodeconfig.RoleWorker {
		return render.WithDefaults(s.config.Spec.Cluster), nil
	}
	if s.config.Spec.Cluster.IsDefined() {
		return bootstrapv1.ClusterConfiguration{}, waitFor(bootstrapv1.InvalidConfigReason, "spec.cluster is for control plane machines: set it in the CapstanControlPlane's spec.config, workers take it from there")
	}
	if s.controlPlane != nil {
		return render.WithDefaults(s.controlPlane.Spec.Config.Cluster), nil
	}
	if isCapstanControlPlane(s.cluster) {
		return bootstrapv1.ClusterConfiguration{}, waitFor(bootstrapv1.WaitingForControlPlaneReason, "the CapstanControlPlane %s does not exist yet", s.cluster.Spec.ControlPlaneRef.Name)
	}
	if !ptr.Deref(s.cluster.Status.Initialization.ControlPlaneInitialized, false) {
		return bootstrapv1.ClusterConfiguration{}, waitFor(bootstrapv1.WaitingForControlPlaneReason, "the control plane is not initialized yet")
	}
	return render.Foreign(), nil
}

func isCapstanControlPlane(cluster *clusterv1.Cluster) bool {
	ref := cluster.Spec.ControlPlaneRef
	return ref.APIGroup == controlplanev1.GroupVersion.Group && ref.Kind == "CapstanControlPlane"
}

func kubernetesVersion(s *scope) (string, error) {
	version := s.owner.version
	if version == "" && s.controlPlane != nil {
		version = s.controlPlane.Spec.Version
	}
	if version == "" {
		return "", waitFor(bootstrapv1.InvalidConfigReason, "the Machine has no spec.version: set the version of Kubernetes that it is to run")
	}
	version, err := render.Version(version)
	if err != nil {
		return "", waitFor(bootstrapv1.InvalidConfigReason, "the Machine's spec.version: %s", err)
	}
	return version, nil
}

// endpoint of the control plane: what the Cluster says, or, before core has copied it there, what the
// kubeconfig secret says, which the control plane provider makes as soon as the endpoint is known.
func (r *Reconciler) endpoint(ctx context.Context, s *scope, network nodeconfig.Network) (string, error) {
	host, endpoint := s.cluster.Spec.ControlPlaneEndpoint.Host, s.cluster.Spec.ControlPlaneEndpoint.String()
	if !s.cluster.Spec.ControlPlaneEndpoint.IsValid() {
		server, err := r.kubeconfigServer(ctx, s.cluster)
		if err != nil {
			return "", err
		}
		if server == nil {
			return "", waitFor(bootstrapv1.WaitingForEndpointReason, "the Cluster has no spec.controlPlaneEndpoint yet")
		}
		host, endpoint = server.Hostname(), server.Host
	}
	if err := render.CheckEndpoint(host, network); err != nil {
		return "", waitFor(bootstrapv1.InvalidConfigReason, "%s", err)
	}
	return endpoint, nil
}

func (r *Reconciler) kubeconfigServer(ctx context.Context, cluster *clusterv1.Cluster) (*url.URL, error) {
	found, err := secret.GetFromNamespacedName(ctx, r.SecretClient, util.ObjectKey(cluster), secret.Kubeconfig)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	server, err := kubeconfig.Server(found.Data[secret.KubeconfigDataName])
	if err != nil || server.Port() == "" {
		return nil, nil // Someone else's; the Cluster will have the endpoint.
	}
	return server, nil
}

// certificates are the files of the certificate authorities: all of them with their keys for a control
// plane machine, only the cluster's certificate for a worker.
func (r *Reconciler) certificates(ctx context.Context, s *scope, role nodeconfig.Role) ([]render.File, error) {
	certificates := Certificates(s.config.Spec.Cluster)
	if role == nodeconfig.RoleWorker {
		certificates = secret.NewCertificatesForWorker(path.Join(nodeconfig.PKIDir, "ca.crt"))
	}
	if err := certificates.LookupCached(ctx, r.SecretClient, r.Client, util.ObjectKey(s.cluster)); err != nil {
		return nil, &notYet{reason: bootstrapv1.CertificatesMissingReason, message: fmt.Sprintf("a certificate authority cannot be read: %s", err), unseen: true}
	}
	var out []render.File
	for _, c := range certificates {
		if c.KeyPair == nil || len(c.KeyPair.Cert) == 0 || role != nodeconfig.RoleWorker && c.KeyFile != "" && len(c.KeyPair.Key) == 0 {
			return nil, waitFor(bootstrapv1.CertificatesMissingReason, "the secret %s is not there, or lacks tls.crt or tls.key", secret.Name(s.cluster.Name, c.Purpose))
		}
		out = append(out, render.File{Path: c.CertFile, Permissions: "0644", Content: c.KeyPair.Cert})
		if role != nodeconfig.RoleWorker && c.KeyFile != "" {
			out = append(out, render.File{Path: c.KeyFile, Permissions: "0600", Content: c.KeyPair.Key})
		}
	}
	if role == nodeconfig.RoleWorker {
		return out, nil
	}
	cross, err := r.crossCertificate(ctx, s)
	return append(out, cross...), err
}

// Certificates are the certificate authorities of a cluster, as the control plane provider makes them
// (CP-15): ECDSA, because an RSA key takes longer than an API server to start.
func Certificates(cluster bootstrapv1.ClusterConfiguration) secret.Certificates {
	config := &kubeadmv1.ClusterConfiguration{
		CertificatesDir:     nodeconfig.PKIDir,
		EncryptionAlgorithm: kubeadmv1.EncryptionAlgorithmECDSAP256,
	}
	if len(cluster.Etcd.External.Endpoints) > 0 {
		config.Etcd.External = kubeadmv1.ExternalEtcd{
			Endpoints: cluster.Etcd.External.Endpoints,
			CAFile:    path.Join(nodeconfig.PKIDir, "etcd", "ca.crt"),
			CertFile:  path.Join(nodeconfig.PKIDir, "apiserver-etcd-client.crt"),
			KeyFile:   path.Join(nodeconfig.PKIDir, "apiserver-etcd-client.key"),
		}
	}
	return secret.NewCertificatesForInitialControlPlane(config)
}

func (r *Reconciler) encryptionKey(ctx context.Context, cluster *clusterv1.Cluster) ([]byte, error) {
	name := EncryptionSecretName(cluster.Name)
	s := &corev1.Secret{}
	err := r.SecretClient.Get(ctx, client.ObjectKey{Namespace: cluster.Namespace, Name: name}, s)
	if client.IgnoreNotFound(err) != nil {
		return nil, err
	}
	if key := s.Data[secret.KubeconfigDataName]; len(key) == render.EncryptionKeySize {
		return key, nil
	}
	return nil, waitFor(bootstrapv1.CertificatesMissingReason, "the secret %s is not there, or its key `value` has not %d bytes", name, render.EncryptionKeySize)
}

// references reads everything that the spec names.
func (r *Reconciler) references(ctx context.Context, config *bootstrapv1.CapstanConfig) (map[bootstrapv1.SecretKeyReference][]byte, error) {
	out := map[bootstrapv1.SecretKeyReference][]byte{}
	for _, ref := range render.References(config.Spec) {
		s := &corev1.Secret{}
		err := r.Client.Get(ctx, client.ObjectKey{Namespace: config.Namespace, Name: ref.Name}, s)
		if client.IgnoreNotFound(err) != nil {
			return nil, err
		}
		content, ok := s.Data[ref.Key]
		if !ok {
			what := fmt.Sprintf("the secret %s does not exist", ref.Name)
			if !apierrors.IsNotFound(err) {
				what = fmt.Sprintf("the secret %s has no key %q", ref.Name, ref.Key)
			}
			return nil, &notYet{reason: bootstrapv1.SecretMissingReason, message: what + ", which the spec names", unseen: true}
		}
		out[ref] = content
	}
	return out, nil
}

func asNotYet(err error) (*notYet, bool) {
	var n *notYet
	ok := errors.As(err, &n)
	return n, ok
}
