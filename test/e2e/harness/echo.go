//go:build e2e

package harness

// Echo returns a Deployment of two pods, on two nodes, behind the Service echo. Each pod responds with its name. The
// line is added to the Service's spec, unless it is empty.
func Echo(line string) string {
	return echo + "  " + line + "\n"
}

const echo = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: echo}
spec:
  replicas: 2
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: echo}}}
      terminationGracePeriodSeconds: 1
      containers:
      - name: echo
        image: registry.capstan.dev/echo:v1
        args: [serve]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
        env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec:
  selector: {app: echo}
  ports: [{port: 80, targetPort: 8080}]
`
