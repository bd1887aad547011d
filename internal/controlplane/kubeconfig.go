package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/klog/v2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util/certs"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/controlplane/model"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/reconciling"
)

// kubeconfigs is the step that provides the kubeconfig Secret of a cluster.
type kubeconfigs struct {
	*clients
	*secrets
}

// reconcile creates the kubeconfig Secret as soon as the endpoint is known. It renews the Secret before its certificate
// expires, and when the endpoint or the certificate authority has changed (CP-13, CP-14). A kubeconfig of the user is used
// and never changed. Without the label of the cluster, Cluster API does not see it, and the condition says so.
func (r *kubeconfigs) reconcile(ctx context.Context, s *scope) (result, error) {
	note, again, err := r.ensureKubeconfig(ctx, s)
	if refused := (*kubeconfig.RefusedError)(nil); errors.As(err, &refused) {
		// A change of the Secret is an event.
		reconciling.SetCondition(s.Object, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionFalse, controlplanev1.KubeconfigRefusedReason, "%s", err)
		return result{}, nil
	}
	if err != nil {
		reconciling.SetCondition(s.Object, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionFalse, controlplanev1.KubeconfigNotAvailableReason, "%s", err)
		if useless := (uselessError)(""); errors.As(err, &useless) {
			return result{}, nil
		}
		return result{}, err
	}
	reconciling.SetCondition(s.Object, controlplanev1.KubeconfigAvailableCondition, metav1.ConditionTrue, controlplanev1.KubeconfigAvailableReason, "%s", note)
	return requeueAfter(again), nil
}

// uselessError is the reason why a kubeconfig cannot be used or created until a Secret changes, which is an event.
type uselessError string

func (e uselessError) Error() string { return string(e) }

// userKubeconfig reports the expiry of the certificate in a kubeconfig of the user, which Capstan does not renew.
func userKubeconfig(access *rest.Config, name string, now time.Time) (note string, again time.Duration, err error) {
	cert, err := certs.DecodeCertPEM(access.CertData)
	if err != nil || cert == nil {
		return fmt.Sprintf("the Secret %s is provided by the user and has no client certificate", name), 0, nil
	}
	ends := cert.NotAfter.UTC().Format(time.RFC3339)
	if !now.Before(cert.NotAfter) {
		return "", 0, uselessError(fmt.Sprintf("the Secret %s is provided by the user, and its client certificate has expired at %s: replace the certificate, or delete the Secret so that Capstan makes one", name, ends))
	}
	note = fmt.Sprintf("the Secret %s is provided by the user, and its client certificate expires at %s: Capstan does not renew it", name, ends)
	return note, cert.NotAfter.Sub(now), nil
}

func (r *kubeconfigs) ensureKubeconfig(ctx context.Context, s *scope) (note string, again time.Duration, err error) {
	validity, renewBefore := kubeconfigTimes(s.Object.Spec.Kubeconfig)
	key := client.ObjectKey{Namespace: s.Cluster.Namespace, Name: secret.Name(s.Cluster.Name, secret.Kubeconfig)}

	existing, err := r.getSecret(ctx, key)
	if err != nil {
		return "", 0, err
	}
	if existing != nil {
		if err := r.ownSecret(ctx, s, existing); err != nil {
			return "", 0, err
		}
		s.access, err = kubeconfig.Load(existing.Data[secret.KubeconfigDataName], s.endpoint)
		switch ours := metav1.IsControlledBy(existing, s.Object); {
		case err != nil && (!ours || s.signer == nil):
			return "", 0, err
		case !ours && !isLabelled(s, existing):
			return "", 0, uselessError(fmt.Sprintf("the Secret %s is provided by the user, and Cluster API does not read it: expected the label %s with the value %s, found %q: set the label, or delete the Secret so that Capstan makes one",
				key.Name, clusterv1.ClusterNameLabel, s.Cluster.Name, existing.Labels[clusterv1.ClusterNameLabel]))
		case !ours:
			return userKubeconfig(s.access, key.Name, s.Now)
		case s.signer == nil:
			return "", 0, nil // CertificatesAvailable names the authority.
		}
		if again := kubeconfigGoodFor(s.access, s.signer.Cert, validity, renewBefore, s.Now); again > 0 {
			return "", again, nil
		}
	}
	if s.signer == nil {
		return "", 0, uselessError("the kubeconfig cannot be made without the certificate authority")
	}
	data, err := newKubeconfig(s.Cluster.Name, "https://"+s.endpoint.String(), s.signer, algorithm(s.Object.Spec), validity, s.Now)
	if err != nil {
		return "", 0, fmt.Errorf("the kubeconfig cannot be made: %w", err)
	}
	if s.access, err = kubeconfig.Load(data, s.endpoint); err != nil {
		return "", 0, err
	}
	if existing == nil {
		return "", validity - renewBefore, r.Client.Create(ctx, ownedSecret(s, key.Name, data))
	}
	ctrl.LoggerFrom(ctx).Info("Renewing kubeconfig", "Secret", klog.KObj(existing))
	before := existing.DeepCopy()
	existing.Data = map[string][]byte{secret.KubeconfigDataName: data}
	// The user may have replaced the Secret since it was read.
	return "", validity - renewBefore, r.Client.Patch(ctx, existing, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

func kubeconfigTimes(spec controlplanev1.KubeconfigSpec) (validity, renewBefore time.Duration) {
	validity = model.Day * controlplanev1.DefaultKubeconfigValidityDays
	if spec.ValidityDays > 0 {
		validity = model.Day * time.Duration(spec.ValidityDays)
	}
	validity = pki.Life(validity)
	renewBefore = validity / 2
	if spec.RenewBeforeDays > 0 {
		renewBefore = model.Day * time.Duration(spec.RenewBeforeDays)
	}
	return validity, renewBefore
}

// kubeconfigGoodFor returns the time until the renewal of a kubeconfig; 0 when it must be created again now, for example because the spec
// wants a shorter validity than that of its certificate.
func kubeconfigGoodFor(config *rest.Config, ca []byte, validity, renewBefore time.Duration, now time.Time) time.Duration {
	if config == nil || !bytes.Equal(config.CAData, ca) {
		return 0
	}
	cert, err := certs.DecodeCertPEM(config.CertData)
	if err != nil || now.Before(cert.NotBefore) { // It was created with a clock that was ahead, and is not valid yet.
		return 0
	}
	if pki.Validity(cert) > validity+time.Second { // Certificates have whole seconds.
		return 0
	}
	if caCert, err := certs.DecodeCertPEM(ca); err == nil && !cert.NotAfter.Before(caCert.NotAfter) {
		return max(model.Day, caCert.NotAfter.Sub(now)) // It ends with its authority, and so would a new one.
	}
	return max(0, cert.NotAfter.Add(-renewBefore).Sub(now))
}

// newKubeconfig returns a kubeconfig for an administrator of the cluster.
func newKubeconfig(cluster, server string, ca *certs.KeyPair, algorithm pki.Algorithm, validity time.Duration, now time.Time) ([]byte, error) {
	authority, err := pki.ParseAuthority(ca.Cert, ca.Key)
	if err != nil {
		return nil, err
	}
	leaf := pki.Leaf{CommonName: "kubernetes-admin", Organization: []string{"system:masters"}, Usages: pki.Client, Algorithm: algorithm}
	cert, signer, err := authority.Issue(leaf, validity, now)
	if err != nil {
		return nil, err
	}
	key, err := pki.EncodeKey(signer)
	if err != nil {
		return nil, err
	}
	user := cluster + "-admin"
	return pki.Kubeconfig{
		ClusterName: cluster, UserName: user, ContextName: user + "@" + cluster,
		Cluster: clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca.Cert},
		User:    clientcmdapi.AuthInfo{ClientCertificateData: pki.EncodeCert(cert), ClientKeyData: key},
	}.Encode()
}
